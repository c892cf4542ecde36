// The machine's own log of everything that is done on it through the broker: the owner reads it, no broker reaches it.
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import { iso, monotonic } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { deedOf, exitOf, type Told } from './deeds.ts';
import { Lines, type LinesOptions } from './lines.ts';

/** One call, as it is told. */
export interface Entry {
  /** Its request, or the first of many. */
  asked(request: unknown, refused?: boolean): void;
  answered(response: unknown): void;
  /** "ok", or the code of the failure. */
  ended(result: string): void;
}

export interface Activity {
  /** A call has come. */
  begin(call: Pick<Call__Output, 'method' | 'request_id' | 'caller'>): Entry;
  /** Everything is in the file when it resolves. */
  close(): Promise<void>;
}

const longestName = 200;
const untold: Entry = { asked: () => {}, answered: () => {}, ended: () => {} };

/** `activity.log` in a directory, with older ones beside it. */
export async function openActivity(
  directory: string,
  log: Logger,
  options: LinesOptions = {},
): Promise<Activity> {
  const lines = await Lines.open(directory, 'activity', log, options);
  return {
    begin({ method, request_id, caller }) {
      const deed = deedOf(method);
      if (!deed) return untold;
      const begun = monotonic();
      // What the broker says: it is told as it came, in bounds.
      const [name, id] = [method, request_id].map((one) => one.slice(0, longestName));
      const key_id = caller?.key_id.slice(0, longestName) ?? '';
      const key_name = caller?.key_name.slice(0, longestName) ?? '';
      let told: Told = {};
      let exit: Told | undefined;
      const add = (event: 'start' | 'end', more: Told): void => {
        const about = { at: iso(), event, method: name, ...told };
        lines.add({ ...about, key_id, key_name, request_id: id, ...more });
      };
      return {
        asked(request, refused = false) {
          told = deed.tell(request);
          if (deed.lasts && !refused) add('start', {});
        },
        answered(response) {
          if (deed.lasts) exit = exitOf(response) ?? exit;
        },
        ended: (result) => add('end', { ...exit, result, ms: Math.round(monotonic() - begun) }),
      };
    },
    close: () => lines.close(),
  };
}
