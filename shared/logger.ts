// Structured logs: one JSON line each on standard error.
import { destination, type Logger as PinoLogger, pino, stdTimeFunctions } from 'pino';

export type Logger = PinoLogger;

export const logLevels = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const;
export type LogLevel = (typeof logLevels)[number];

/** What waits for a disk that is full; lines beyond are dropped. */
const mostWaiting = 1024 * 1024;

/** A logger for one program. Synchronous, so that the last line before a crash is not lost. */
export function createLogger(program: string, level: LogLevel): Logger {
  const stream = destination({ fd: 2, sync: true, maxLength: mostWaiting });
  // Without a listener a disk that is full would end the program at its next line.
  stream.on('error', () => {});
  return pino({ name: program, level, timestamp: stdTimeFunctions.isoTime, base: { name: program } }, stream);
}
