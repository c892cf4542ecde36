// Times and limits of the links to agents. Tests replace some of them.

export const defaultSettings = {
  heartbeatMs: 15_000,
  silenceMs: 45_000,
  /**
   * Maximum number of short streaming calls open at once on one machine. Bulk calls, such as transfers and searches,
   * have a separate limit of the same number.
   */
  openCalls: 32,
  /** Longest silence of a machine in the middle of a streaming call, in milliseconds. */
  callIdleMs: 60_000,
};
export type LinkSettings = typeof defaultSettings;
