// WebSocket close codes of a terminal. They have a file of their own, because the SDK needs them without zod's schemas.

export const closeCodes = {
  ended: 1000,
  stopping: 1001,
  detached: 4001,
  forbidden: 4003,
  fell_behind: 4008,
} as const;
