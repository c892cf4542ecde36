// The machine's own log of everything that is done on it through the broker: the owner reads it, no file call reaches it.
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import { after, iso, monotonic } from '../../shared/clock.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import { methods } from '../../shared/rpc.ts';
import { deedOf, exitOf, type Told } from './deeds.ts';
import { cut, Lines, type LinesOptions } from './lines.ts';

/** One call, as it is told. */
export interface Entry {
  /** Its request, or the first of many. */
  asked(request: unknown): void;
  answered(response: unknown): void;
  /** It is done, whoever hears of it. */
  done(): void;
  /** "ok", or the code of the failure. */
  ended(result: string): void;
}

export interface Activity {
  /** A call has come; `refused`: and nothing comes of it. */
  begin(call: Pick<Call__Output, 'method' | 'request_id' | 'caller'>, refused?: boolean): Entry;
  /** Everything is in the file when it resolves. */
  close(): Promise<void>;
}

interface ActivityOptions extends LinesOptions {
  /** What is not over by then has a line as it is. */
  slowMs?: number;
}

const longestName = 200;
/** What was refused must not push out what was done: so many lines a minute of each method and code, and then a number. */
const mostRefusals = 5;
const minute = 60_000;
const untold: Entry = { asked: () => {}, answered: () => {}, done: () => {}, ended: () => {} };

/** `activity.log` in a directory, with older ones beside it. */
export async function openActivity(
  directory: string,
  log: Logger,
  { slowMs = 1_000, ...options }: ActivityOptions = {},
): Promise<Activity> {
  const lines = await Lines.open(directory, 'activity', log, options);
  const refusals = new LogLimiter<{ method: string; result: string }>(mostRefusals, minute, (one, more) =>
    lines.add({ at: iso(), event: 'more', ...one, more }),
  );

  return {
    begin(call, refused = false) {
      const deed = deedOf(call.method);
      if (!deed) return untold;
      const begun = monotonic();
      // What the broker says: it is told as it came, in bounds.
      const bounded = (text = ''): string => cut(text, longestName);
      const method = bounded(call.method);
      const who = { key_id: bounded(call.caller?.key_id), key_name: bounded(call.caller?.key_name) };
      const request_id = bounded(call.request_id);
      let told: Told = {};
      let exit: Told | undefined;
      let done = false;
      let stopWaiting = (): void => {};
      // What is long comes last: it gives way to the rest.
      const add = (event: 'start' | 'end', more: Told): void =>
        lines.add({ at: iso(), event, method, ...who, request_id, ...more, ...told });
      const isHeld = (result: string): boolean => {
        if (!refused && result !== 'permission_denied') return false;
        const kind = methods.has(call.method) ? { method, result } : { method: 'unknown', result };
        return !refusals.take(`${kind.method} ${result}`, kind);
      };
      return {
        asked(request) {
          told = deed.tell(request);
          if (refused) return;
          const start = (): void => add('start', {});
          if (deed.lasts) start();
          else stopWaiting = after(slowMs, start);
        },
        answered(response) {
          if (deed.lasts) exit = exitOf(response) ?? exit;
        },
        done() {
          done = true;
        },
        ended(result) {
          stopWaiting();
          if (isHeld(result)) return;
          const unheard = done && result !== 'ok';
          const outcome = unheard ? { result: 'ok', unheard } : { result };
          add('end', { ...exit, ...outcome, ms: Math.round(monotonic() - begun) });
        },
      };
    },
    async close() {
      refusals.close();
      await lines.close();
    },
  };
}
