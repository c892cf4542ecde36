// The program of the upgrade unit, `farhand-agent apply-upgrade`: verifies a package and replaces the agent. If the new
// version does not link to the broker, restores the previous version.
import { existsSync, readFileSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import * as z from 'zod';
import { now, sleep } from '../../../shared/clock.ts';
import { writeDurably } from '../../../shared/durable-file.ts';
import { StartError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { version } from '../../../shared/version.ts';
import type { AgentSettings } from '../../settings-schema.ts';
import {
  installedKind,
  type UpgradePaths,
  type UpgradeResult,
  upgradePaths,
} from '../files-shared-with-root.ts';
import { pinKey } from '../trusted-key.ts';
import { DebianPackage } from './debian-installer.ts';
import type { Installer } from './package-installer-interface.ts';
import { dropRequest, takeRequest, verifiedCopy } from './take-request.ts';
import { TarVersions } from './tar-installer.ts';
import { faultOfNewVersion, faultOfRestored } from './try-version.ts';

/**
 * The phase that a running upgrade has reached. It is written to the disk before the phase begins, so that a reboot
 * cannot lose it.
 */
const stateSchema = z.object({
  upgrade_id: z.string(),
  kind: z.enum(['tar.gz', 'deb']),
  from_version: z.string(),
  to_version: z.string(),
  link_timeout_ms: z.number(),
  /** The key that the machine trusts once the upgrade has succeeded, in base64. */
  public_key: z.string(),
  phase: z.enum(['switching', 'rolling_back']),
  /** Number of times that this phase was started. A phase that a reboot has interrupted is started again. */
  begun: z.number(),
  /** Why the previous version is being restored; empty as long as the new version may still succeed. */
  reason: z.string(),
  /** Directory names of the previous and the new version in /opt/farhand-agent; empty for a Debian package. */
  before: z.string(),
  after: z.string(),
});
type State = z.output<typeof stateSchema>;
type Facts = Pick<State, 'upgrade_id' | 'from_version' | 'to_version'>;
type Outcome = UpgradeResult['outcome'];

/** Maximum number of times that the new version is tried. An interrupted try is started again. */
const mostSwitches = 2;
/** Maximum number of times that a rollback is started. A failed rollback is started again. */
const mostRollbacks = 5;
const retryMs = 10_000;

export async function applyUpgrade(settings: AgentSettings, log: Logger): Promise<void> {
  if (process.getuid?.() !== 0)
    throw new StartError(
      'only systemd runs apply-upgrade, as root, in the unit farhand-agent-upgrade.service',
      1,
    );
  const upgrade = new Upgrade(settings, log);
  try {
    if (existsSync(upgradePaths(settings.upgrade_dir).state)) await upgrade.finish();
    else await upgrade.begin();
  } catch (error) {
    // While the state file or a request exists, systemd starts the unit again as soon as it ends. This pause limits how
    // often a unit that keeps failing is started.
    await sleep(retryMs);
    throw error;
  }
}

class Upgrade {
  readonly #settings: AgentSettings;
  readonly #paths: UpgradePaths;
  readonly #log: Logger;

  constructor(settings: AgentSettings, log: Logger) {
    this.#settings = settings;
    this.#log = log;
    this.#paths = upgradePaths(settings.upgrade_dir);
  }

  /**
   * Takes a request, prepares the new version and writes the state file. As long as that file exists, systemd starts
   * the unit again after each run. The next run then calls finish(). If the package is refused, no state file is
   * written.
   */
  async begin(): Promise<void> {
    const { upgrade_dir: directory } = this.#settings;
    const taken = await takeRequest(directory);
    if (!taken) return;
    const { request, interrupted } = taken;
    const { upgrade_id, version: to_version, kind, link_timeout_ms } = request;
    const facts = { upgrade_id, from_version: version, to_version };
    this.#log.info(facts, 'an upgrade begins');
    try {
      if (interrupted)
        throw new StartError(
          'the machine or its upgrade unit was interrupted before the new version was started; upgrade the machine again',
        );
      await this.#report(facts, 'RUNNING', '');
      await verifiedCopy(directory, request, this.#settings);
      const names = await this.#installer(kind).prepare(to_version);
      const public_key = request.public_key.toString('base64');
      const start = { phase: 'switching', begun: 0, reason: '', ...names } as const;
      await this.#store({ ...facts, kind, link_timeout_ms, public_key, ...start });
    } catch (error) {
      const reason = messageOf(error);
      this.#log.error({ ...facts, reason }, 'the package was refused; nothing was changed');
      // Files are removed first, because a full disk has no space for the report.
      await this.#clean();
      if (kind === installedKind(directory)) await this.#sweep(kind);
      await this.#report(facts, 'FAILED', reason);
    }
    await dropRequest(directory);
  }

  /** Runs an upgrade from the phase in the state file to its end. After a reboot or crash, that phase starts again. */
  async finish(): Promise<void> {
    // A crash may have left the request after the state file was written. begin() would then report a failure later.
    await dropRequest(this.#settings.upgrade_dir);
    const stored = stateSchema.parse(JSON.parse(readFileSync(this.#paths.state, 'utf8')));
    const state = await this.#begun(stored);
    if (state.phase === 'rolling_back') return await this.#rollBack(state);
    const reason =
      state.begun > mostSwitches
        ? 'the machine or its upgrade unit was interrupted twice while the new version was tried'
        : await this.#faultOf(state);
    if (reason === undefined) return await this.#succeed(state);
    this.#log.error(
      { to_version: state.to_version, reason },
      'the new version failed; restoring the previous version',
    );
    const back = { ...state, phase: 'rolling_back', begun: 0, reason } as const;
    await this.#store(back);
    await this.#rollBack(await this.#begun(back));
  }

  /** Switches to the new version and tries it. Returns what is wrong with that version; undefined if it works. */
  async #faultOf(state: State): Promise<string | undefined> {
    const installer = this.#installer(state.kind);
    try {
      await installer.forward(state);
      return await faultOfNewVersion(installer.command, state.to_version, state.link_timeout_ms);
    } catch (error) {
      return messageOf(error);
    }
  }

  async #succeed(state: State): Promise<void> {
    await pinKey(this.#settings.upgrade_dir, Buffer.from(state.public_key, 'base64'));
    await this.#end(state, 'SUCCEEDED', '');
    await this.#sweep(state.kind);
  }

  async #rollBack(state: State): Promise<void> {
    const installer = this.#installer(state.kind);
    const { reason } = state;
    try {
      await installer.back(state);
    } catch (error) {
      const failure = `${reason}; the previous version could not be restored: ${messageOf(error)}`;
      this.#log.error({ reason: failure }, 'the previous version could not be restored');
      if (state.begun >= mostRollbacks) return await this.#end(state, 'FAILED', failure);
      throw error;
    }
    // The outcome is written before the previous version starts, because that version reports it in its hello.
    await this.#report(state, 'ROLLED_BACK', reason);
    const { from_version } = state;
    const fault = await faultOfRestored(installer.command, from_version);
    if (fault) this.#log.error({ from_version, reason: fault }, 'the restored version does not run');
    await this.#end(state, 'ROLLED_BACK', fault ? `${reason}; ${fault}`.slice(0, 1_000) : reason);
    await this.#sweep(state.kind);
  }

  async #end(state: State, outcome: Outcome, reason: string): Promise<void> {
    this.#log.info({ outcome, to_version: state.to_version, reason }, 'the upgrade is over');
    await this.#report(state, outcome, reason);
    await rm(this.#paths.state, { force: true });
    await this.#clean();
  }

  /** Removes the files that no version needs. Never rejects, because the outcome must be reported in any case. */
  async #sweep(kind: State['kind']): Promise<void> {
    await this.#installer(kind)
      .sweep()
      .catch((err: unknown) => this.#log.warn({ err }, 'files of earlier versions could not be removed'));
  }

  #installer(kind: State['kind']): Installer {
    return kind === 'deb' ? new DebianPackage(this.#paths) : new TarVersions(this.#paths);
  }

  async #begun(state: State): Promise<State> {
    const next = { ...state, begun: state.begun + 1 };
    await this.#store(next);
    return next;
  }

  async #store(state: State): Promise<void> {
    await writeDurably(this.#paths.state, JSON.stringify(state));
  }

  async #report(facts: Facts, outcome: Outcome, reason: string): Promise<void> {
    const { upgrade_id, from_version, to_version } = facts;
    const finished = outcome === 'RUNNING' ? {} : { finished_at_ms: now() };
    const result = { upgrade_id, outcome, from_version, to_version, reason, ...finished };
    await writeDurably(this.#paths.result, JSON.stringify(result), { mode: 0o644 });
  }

  /**
   * Removes the package's copies and the directory `rescue`. This program may run from `rescue`, so it must load no
   * module afterwards.
   */
  async #clean(): Promise<void> {
    await rm(this.#paths.copy, { force: true });
    await rm(this.#paths.rescue, { recursive: true, force: true });
    // The agent can write in `incoming`. If it has put a directory at the path of the package, that directory stays.
    await rm(this.#paths.package, { force: true }).catch(() => undefined);
  }
}

function messageOf(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text.slice(0, 1_000);
}
