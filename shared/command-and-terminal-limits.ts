// Limits of commands and terminals, for the agent and the broker.

/** Maximum number of commands that may be open on a machine at once. */
export const openCommands = 64;
/** Maximum number of commands that may wait for a busy or offline machine. */
export const waitingCommands = 1024;
/** Milliseconds between SIGTERM and SIGKILL when a command times out or is cancelled. */
export const killGraceMs = 10_000;
/**
 * Number of bytes that are stored from the end of a command's stdout, and again from the end of its stderr. It is the
 * same on the machine and in the broker's copy. Up to about a sixteenth more may be stored.
 */
export const outputWindowBytes = 64 * 1024 * 1024;
/**
 * Milliseconds that a command waits for a slow reader that accepts no data. After that the command goes on without this
 * reader.
 */
export const readerStallMs = 5_000;

/** Maximum number of terminals that may be open on a machine at once. */
export const openTerminals = 32;
/** Maximum number of terminal clients that a machine may have at once. */
export const terminalClients = 128;
/**
 * How many of the last bytes of a terminal's output are stored. Up to a sixteenth more may be stored. A client that
 * reads too slowly is disconnected when the next byte for it is no longer stored.
 */
export const terminalWindowBytes = 1024 * 1024;
/**
 * Maximum number of bytes of earlier output that a new client receives. Also the maximum number of unacknowledged
 * bytes that are sent to a client.
 */
export const terminalReplayBytes = 256 * 1024;
