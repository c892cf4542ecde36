// Numbers of commands and terminals that agent and broker share.

/** Commands that one machine has at once. */
export const openCommands = 64;
/** Between TERM and KILL, in milliseconds, at a timeout and at a cancel. */
export const killGraceMs = 10_000;
/** Last bytes kept of each output, by the agent until the broker has them and by the broker later. */
export const outputWindowBytes = 64 * 1024 * 1024;
/** A reader that takes nothing for so many milliseconds no longer holds up a command. */
export const readerStallMs = 5_000;

/** Terminals that one machine has at once. */
export const openTerminals = 32;
/** Clients of all terminals of one machine. */
export const terminalClients = 128;
/** Last bytes of a terminal's output that are kept; a client that falls behind further is cut. */
export const terminalWindowBytes = 1024 * 1024;
/** What a client gets first of what was there before it, and what may be on its way to it. */
export const terminalReplayBytes = 256 * 1024;
