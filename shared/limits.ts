// Limits on commands and terminals that agent and broker share.

/** Most commands that may be open on a machine at once. */
export const openCommands = 64;
/** Milliseconds from TERM to KILL, at a timeout or cancel. */
export const killGraceMs = 10_000;
/** Bytes of each output that are stored, first by the agent, later by the broker. */
export const outputWindowBytes = 64 * 1024 * 1024;
/** Milliseconds after which a reader that takes nothing no longer slows its command. */
export const readerStallMs = 5_000;

/** Open terminals per machine. */
export const openTerminals = 32;
/** Terminal clients per machine. */
export const terminalClients = 128;
/** Bytes of a terminal's output that are stored; a client further behind is disconnected. */
export const terminalWindowBytes = 1024 * 1024;
/** Bytes of earlier output that a new client gets, and unacknowledged bytes on the way to a client. */
export const terminalReplayBytes = 256 * 1024;
