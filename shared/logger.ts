// Writes a program's log to standard error: JSON lines, or text lines with a priority for systemd's journal.
import { fstatSync } from 'node:fs';
import { destination, type Logger as PinoLogger, pino, stdSerializers, stdTimeFunctions } from 'pino';
import { after } from './clock.ts';
import { AppError } from './errors.ts';
import { clean } from './sanitize-text.ts';

export type Logger = PinoLogger;

export const logLevels = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const;
export type LogLevel = (typeof logLevels)[number];

/**
 * True if standard error is systemd's journal. systemd sets $JOURNAL_STREAM to the device and inode of the
 * journal's stream (systemd.exec(5)).
 */
export function isJournal({ JOURNAL_STREAM: stream }: Record<string, string | undefined>): boolean {
  if (!stream) return false;
  const { dev, ino } = fstatSync(2);
  return stream === `${dev}:${ino}`;
}

/**
 * Maximum number of bytes of log lines that wait in memory, while the disk is full or standard error is read slowly.
 * Further lines are dropped.
 */
const mostWaiting = 8 * 1024 * 1024;
/** Milliseconds between a failed attempt to write the waiting lines and the next attempt. */
const retryMs = 50;
/** Maximum number of attempts to write when the program ends, 100 ms apart. */
const triesAtExit = 20;

/** The destination that all loggers of a process share. */
let shared: ReturnType<typeof createStderr> | undefined;

/** Creates a stream to standard error. It writes each line immediately, but a full pipe delays no other work. */
function createStderr() {
  let triesLeft = 0;
  // Returns true if sonic-boom, the library of pino's destination(), may repeat a failed write itself. It may do so
  // only when the program ends, because each repetition stops the whole thread for 100 ms.
  const retryEAGAIN = (): boolean => {
    triesLeft -= 1;
    return triesLeft > 0;
  };
  const stderr = destination({ fd: 2, sync: true, maxLength: mostWaiting, retryEAGAIN });
  let isWaiting = false;
  // Without this listener, a full disk would end the program at its next log line.
  stderr.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code !== 'EAGAIN' || triesLeft > 0 || isWaiting) return;
    isWaiting = true;
    after(retryMs, () => {
      isWaiting = false;
      // An empty write makes sonic-boom write the waiting lines too.
      stderr.write('');
    });
  });
  process.once('exit', () => {
    triesLeft = triesAtExit;
    stderr.write('');
  });
  return stderr;
}

/** Creates the logger of a program. It writes synchronously, so that the last lines before a crash are not lost. */
export function createLogger(program: string, level: LogLevel, journal = false): Logger {
  shared ??= createStderr();
  const stderr = shared;
  const readable = {
    write(line: string): void {
      const entry: unknown = JSON.parse(line);
      stderr.write(journalText({ ...(typeof entry === 'object' ? entry : {}) }));
    },
  };
  return pino(
    {
      ...{ name: program, level, timestamp: stdTimeFunctions.isoTime, base: { name: program } },
      serializers: { err: describeError },
    },
    journal ? readable : stderr,
  );
}

/** Describes an error for the log. Expected errors, such as a database that does not answer, have no stack there. */
function describeError(error: Error): object {
  const description = stdSerializers.err(error);
  if (!(error instanceof AppError) || error.code === 'internal_error') return description;
  const { stack: _, ...rest } = description;
  return rest;
}

/** Prefixes each line with a syslog priority for systemd's journal (sd-daemon(3)). The journal adds the time. */
export function withPriority(text: string, priority: number): string {
  const lines = text.split('\n').map((line) => `<${priority}>${clean(line)}\n`);
  return lines.join('');
}

/** Formats a log entry as `message name=value …`. The stack of an error follows on separate lines. */
function journalText(entry: Record<string, unknown>): string {
  const { level, time: _, name: __, msg = '', err, ...fields } = entry;
  const { stack = '', ...error } = typeof err === 'object' && err !== null ? { stack: '', ...err } : {};
  const pairs = Object.entries({ ...fields, ...error }).map(([name, value]) => `${name}=${textOf(value)}`);
  const lines = [[String(msg), ...pairs].join(' '), ...String(stack).split('\n').slice(1)];
  return withPriority(lines.join('\n').trimEnd(), priorityOf(Number(level)));
}

function textOf(value: unknown): string {
  return typeof value === 'string' && /^[^\s"=]+$/.test(value) ? value : JSON.stringify(value);
}

/** Converts a level of pino to a priority of syslog(3): debug, info, warning, err or crit. */
function priorityOf(level: number): number {
  if (level < 30) return 7;
  if (level < 40) return 6;
  if (level < 50) return 4;
  return level < 60 ? 3 : 2;
}
