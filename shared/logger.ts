// Structured logs: one JSON line each on standard error.
import { destination, type Logger as PinoLogger, pino, stdTimeFunctions } from 'pino';

export type Logger = PinoLogger;

export const logLevels = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const;
export type LogLevel = (typeof logLevels)[number];

/** A logger for one program. Synchronous, so that the last line before a crash is not lost. */
export function createLogger(program: string, level: LogLevel): Logger {
  return pino(
    { name: program, level, timestamp: stdTimeFunctions.isoTime, base: { name: program } },
    destination({ fd: 2, sync: true }),
  );
}
