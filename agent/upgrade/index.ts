// The rpc StageUpgrade: receives a signed package, waits for running processes, and asks root to replace the agent. The
// agent itself may not write in its program's directory.
import { rm, unlink } from 'node:fs/promises';
import * as z from 'zod';
import type { StageUpgradeRequest__Output } from '../../proto/types/farhand/agent/v1/StageUpgradeRequest.ts';
import type { StageUpgradeResponse } from '../../proto/types/farhand/agent/v1/StageUpgradeResponse.ts';
import type { Installation } from '../../proto/types/farhand/link/v1/Installation.ts';
import type { LastUpgrade } from '../../proto/types/farhand/link/v1/LastUpgrade.ts';
import { fingerprintOf } from '../../shared/agent-package-signature.ts';
import type { AgentMethods } from '../../shared/agent-rpcs.ts';
import { monotonic, sleep } from '../../shared/clock.ts';
import { writeDurably } from '../../shared/durable-file.ts';
import { errnoOf, fromErrno, ignoring } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { home } from '../../shared/paths-in-checkout-or-package.ts';
import { unlessAborted } from '../../shared/stop-waiting-on-abort.ts';
import { Upload } from '../files/upload-messages.ts';
import type { Processes } from '../processes/index.ts';
import { acceptUpgrade, type Open, receivePackage, refusal } from './accept-and-receive-package.ts';
import {
  installedKind,
  kindOfHome,
  readResult,
  requestSchema,
  type UpgradeRequest,
  upgradePaths,
} from './files-shared-with-root.ts';
import { readTrustedKey, readUsableKey } from './trusted-key.ts';

export interface UpgradesOptions {
  /** Directory shared with the systemd unit farhand-agent-upgrade; see files-shared-with-root.ts. */
  directory: string;
  /** The only version that the machine's owner accepts; undefined if the owner accepts any. */
  holdVersion: string | undefined;
  processes: Pick<Processes, 'running' | 'refuseStarts'>;
  log: Logger;
}

const pollMs = 250;
/**
 * While an upgrade waits for running processes, it reports their number at least once in this many milliseconds.
 * Otherwise the call would count as idle.
 */
const reportMs = 20_000;
/**
 * Milliseconds in which farhand-agent-upgrade.service, which runs as root, must take the agent's request. systemd
 * starts this unit as soon as the agent has written the request.
 */
const takenMs = 30_000;
/**
 * Milliseconds for which no process may start after an upgrade was handed to root. Normally the upgrade restarts the
 * agent earlier.
 */
const switchMs = 15 * 60_000;
const longestWaitMs = 3_600_000;

export class Upgrades {
  readonly #options: UpgradesOptions;
  readonly #closing = new AbortController();
  /** True while a package is received, waits for running processes, or is installed by root. */
  #busy = false;

  constructor(options: UpgradesOptions) {
    this.#options = options;
  }

  readonly handlers: Pick<AgentMethods, 'stageUpgrade'> = {
    stageUpgrade: (requests, { signal }) => this.#stage(requests, signal),
  };

  /**
   * Returns how this agent is installed, and the outcome of its last upgrade. Each hello to the broker contains them.
   */
  installation(): Installation {
    const { directory, holdVersion = '' } = this.#options;
    const installed = installedKind(directory);
    // A damaged key file counts as no key here. StageUpgrade reports what is wrong with the file.
    const key = readUsableKey(directory);
    return {
      kind: kinds[installed ?? kindOfHome(home) ?? 'none'],
      upgrade_unit: installed !== undefined,
      trusted_key: key ? fingerprintOf(key) : '',
      hold_version: holdVersion,
      last_upgrade: this.lastUpgrade(),
    };
  }

  lastUpgrade(): LastUpgrade | null {
    const result = readResult(this.#options.directory);
    if (!result) return null;
    const { outcome, finished_at_ms, ...facts } = result;
    const finished = finished_at_ms === undefined ? {} : { finished_at_ms };
    return { ...facts, ...finished, outcome: `UPGRADE_OUTCOME_${outcome}` };
  }

  close(): void {
    this.#closing.abort();
  }

  async *#stage(
    requests: AsyncIterable<StageUpgradeRequest__Output>,
    signal: AbortSignal,
  ): AsyncGenerator<StageUpgradeResponse> {
    if (this.#busy)
      throw refusal('conflict', 'in_progress', 'another upgrade of this machine is running; try again later');
    this.#busy = true;
    const { package: file } = upgradePaths(this.#options.directory);
    let handedOver: Promise<void> | undefined;
    try {
      using upload = await Upload.begin(requests, signal);
      const request = this.#accept(upload.open);
      await receivePackage(file, request, upload);
      yield { staged: {} };
      for await (const processes of this.#waiting(upload.open, signal)) yield { waiting: { processes } };
      handedOver = this.#handOver(request);
      yield { switching: {} };
      await unlessAborted(signal, handedOver);
    } catch (error) {
      throw errnoOf(error) ? fromErrno(error, file) : error;
    } finally {
      if (!handedOver) {
        await this.#removePackage();
        this.#busy = false;
      }
    }
  }

  async #removePackage(): Promise<void> {
    // If this fails, the next upgrade reports why.
    await rm(upgradePaths(this.#options.directory).package, { force: true }).catch(() => undefined);
  }

  #accept(open: Open): UpgradeRequest {
    const { directory, holdVersion } = this.#options;
    return acceptUpgrade(open, {
      installed: installedKind(directory),
      packaged: kindOfHome(home) !== undefined,
      holdVersion,
      trusted: readTrustedKey(directory),
      last: readResult(directory),
    });
  }

  /**
   * Yields the number of running processes until it is 0. Throws if they run for too long. Does not wait if the request
   * allows the upgrade to end them.
   */
  async *#waiting({ running, wait_ms }: Open, signal: AbortSignal): AsyncGenerator<number> {
    if (running === 'RUNNING_PROCESSES_END') return;
    const { processes } = this.#options;
    const until = monotonic() + (wait_ms || longestWaitMs);
    let reported: { count: number; at: number } | undefined;
    for (let count = processes.running(); count > 0; count = processes.running()) {
      if (monotonic() > until)
        throw refusal(
          'conflict',
          'processes_running',
          `the upgrade waited too long: commands or terminals still run on this machine (${count}); try again later`,
        );
      if (reported?.count !== count || monotonic() - reported.at >= reportMs) {
        reported = { count, at: monotonic() };
        yield count;
      }
      await sleep(pollMs, signal);
      signal.throwIfAborted();
    }
  }

  /**
   * Asks root to install the package. Rejects if root refuses the package or does not take the request. Resolves when
   * the agent stops, or after `switchMs` milliseconds.
   */
  #handOver(request: UpgradeRequest): Promise<void> {
    const { processes, log } = this.#options;
    // The upgrade restarts the agent, which would end a process that starts now. So no process may start.
    processes.refuseStarts(true);
    const done = this.#switch(request)
      .catch(async (error: unknown) => {
        await this.#removePackage();
        throw error;
      })
      .finally(() => {
        processes.refuseStarts(false);
        this.#busy = false;
      });
    // A failure is reported to the broker, and also logged here. The broker gets no report if the link is lost: the
    // call then ends, but the upgrade continues.
    done.catch((error: unknown) => log.warn({ err: error }, 'the agent was not upgraded'));
    return done;
  }

  async #switch(request: UpgradeRequest): Promise<void> {
    const { directory } = this.#options;
    const file = upgradePaths(directory).request;
    const { upgrade_id } = request;
    await writeDurably(file, JSON.stringify(z.encode(requestSchema, request)));
    const begun = monotonic();
    while (!this.#closing.signal.aborted && monotonic() - begun < switchMs) {
      const result = readResult(directory);
      if (result?.upgrade_id === upgrade_id && result.outcome !== 'RUNNING')
        throw refusal(
          'machine_error',
          'refused',
          `the systemd unit farhand-agent-upgrade.service did not install the package: ${result.reason}`,
        );
      // Root takes the request by renaming this file. If the agent can still remove the file after `takenMs`, root has
      // not taken the request. After the removal, root can no longer take it.
      const isLate = monotonic() - begun > takenMs;
      if (isLate && (await unlink(file).then(() => true, ignoring('ENOENT'))))
        throw refusal(
          'not_supported',
          'no_upgrade_unit',
          'the systemd unit farhand-agent-upgrade.path does not run on this machine; as root on this machine, run farhand-agent install',
        );
      await sleep(pollMs, this.#closing.signal);
    }
  }
}

const kinds = {
  'tar.gz': 'PACKAGE_KIND_TAR_GZ',
  deb: 'PACKAGE_KIND_DEB',
  none: 'PACKAGE_KIND_UNSPECIFIED',
} as const;
