// Prints on standard error why a command is silent: the broker cannot be reached, or the command's machine is offline.
import { after, sleep } from '../../../shared/clock.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { hint } from '../print.ts';

/** A broken connection is reported after this number of milliseconds. Shorter interruptions are not reported. */
const brokenMs = 3_000;
/** After this many milliseconds without an event of the command, the status of its machine is read. */
const silentMs = 10_000;

export interface ConnectionReporter {
  changed(command_id: string, isOpen: boolean): void;
  /** Called when a command is no longer followed. */
  forget(command_id: string): void;
}

/** Reports when the output stream of a command has lost its connection, and when all streams are connected again. */
export function reportConnection(whatGoesOn: string): ConnectionReporter {
  const broken = new Set<string>();
  let reported = false;
  let cancel: (() => void) | undefined;
  const forget = (command_id: string): void => {
    broken.delete(command_id);
    if (broken.size > 0) return;
    cancel?.();
    cancel = undefined;
  };
  const report = (): void => {
    reported = true;
    hint(`farhand: the connection to the broker broke: trying again; ${whatGoesOn}`);
  };
  return {
    forget,
    changed(command_id, isOpen) {
      if (!isOpen) {
        broken.add(command_id);
        cancel ??= after(brokenMs, report);
        return;
      }
      forget(command_id);
      if (reported && broken.size === 0) {
        hint('farhand: connected to the broker again');
        reported = false;
      }
    },
  };
}

/** Reports when the machine of a silent command is offline, and when it is online again. */
export function reportMachine(client: Farhand, machine_id: string, name: string) {
  const over = new AbortController();
  let isSilent = true;
  let isOffline = false;
  const look = async (): Promise<void> => {
    const signal = AbortSignal.any([over.signal, AbortSignal.timeout(silentMs)]);
    const { status } = await client.machines.get({ machine_id }, { signal });
    if (over.signal.aborted || isOffline === (status === 'offline')) return;
    isOffline = status === 'offline';
    hint(
      isOffline
        ? `farhand: ${name} is offline: waiting until it is back and reports on the command; Ctrl-C cancels the command`
        : `farhand: ${name} is online again`,
    );
  };
  const watch = async (): Promise<void> => {
    while (!over.signal.aborted) {
      await sleep(silentMs, over.signal);
      // look() fails if the key lacks machines:read or the broker cannot be reached. Then nothing is reported.
      if (isSilent && !over.signal.aborted) await look().catch(() => {});
      isSilent = true;
    }
  };
  void watch();
  return {
    heard(): void {
      isSilent = false;
    },
    stop: () => over.abort(),
  };
}
