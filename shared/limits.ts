// Numbers of commands that agent and broker share.

/** Commands that one machine has at once. */
export const openCommands = 64;
/** Between TERM and KILL, in milliseconds, at a timeout and at a cancel. */
export const killGraceMs = 10_000;
/** Last bytes kept of each output, by the agent until the broker has them and by the broker later. */
export const outputWindowBytes = 64 * 1024 * 1024;
/** A reader that takes nothing for so many milliseconds no longer holds up a command. */
export const readerStallMs = 5_000;
