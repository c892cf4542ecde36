// The verbs that change versions of agents: farhand machines upgrade, pin and hold, farhand upgrades, farhand packages.
import { openAsBlob } from 'node:fs';
import { access, readFile } from 'node:fs/promises';
import { basename } from 'node:path';
import type { Command } from 'commander';
import { sleep } from '../../shared/clock.ts';
import { definedFields } from '../../shared/defined-fields.ts';
import { isErrno, StartError, UsageError } from '../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../shared/sdk/index.ts';
import { atPath } from '../../shared/system-error-messages.ts';
import { verb } from './declare-verb.ts';
import { findMachine } from './find-by-name.ts';
import { clean, hint, print, record, size, when } from './print.ts';
import { Exit, onStop, writeNow } from './stdout-stderr-and-exit.ts';
import { latest, ofMachine, printView, routeVerb } from './verb-from-route.ts';

type Upgrade = Awaited<ReturnType<Farhand['upgrades']['get']>>;

/** Milliseconds between two requests for the state of an upgrade. */
const pollMs = 1_000;
/** Maximum number of machines that are printed for each of the statuses failed and skipped. */
const mostFailures = 20;

const upgradeSpec = {
  about: 'install another version of the agent on machines, a wave at a time',
  examples: [
    'farhand machines upgrade web-1',
    'farhand machines upgrade --tags web --wave 10% --pause 5m --max-failures 2',
    'farhand machines upgrade --tags web --to 1.2.3 --running end --detach',
  ],
  flags: {
    '--tags <list>': 'upgrade every machine with all of these tags',
    '--to <version>': 'version to install, newer or older (default: the version of the broker)',
    '--wave <size>': 'machines of one wave: a number, or a percentage of all (default: 10%)',
    '--pause <duration>': 'pause between two waves (default: 1m)',
    '--max-failures <number>': 'stop after more than NUMBER failures (default: 0)',
    '--running <wait|end>': 'wait for running commands and terminals (default), or end them',
    '--wait-for <duration>': 'skip a machine that is still busy after this time (default: 1h)',
    '--queue-for <duration>': 'skip a machine that is still offline after this time (default: 1h)',
    '--probe-timeout <duration>':
      'restore the old version if the new agent does not connect within this time (default: 2m)',
    '--detach': 'print the id of the upgrade, and do not wait for its end',
  },
} as const;

export function addMachineUpgrade(machines: Command): void {
  verb(machines, 'upgrade [machines...]', upgradeSpec, async (client, names, options) => {
    const { tags, to: version, wave, pause, running, detach, output } = options;
    const { maxFailures: max_failures, waitFor: wait_for, queueFor: queue_for } = options;
    if ((names.length === 0) === (tags === undefined))
      throw new UsageError('choose the machines either by name or by --tags');
    const machine_ids = tags ? undefined : await Promise.all(names.map((text) => findMachine(client, text)));
    const limits = { max_failures, wait_for, queue_for, probe_timeout: options.probeTimeout };
    const made = await client.upgrades.create(
      definedFields({ machine_ids, tags, version, wave, pause, running, ...limits }),
    );
    if (detach) return print(output, made, () => [made.id]);
    const ended = await followUpgrade(client, made);
    await print(output, ended, () => upgradeText(ended, client));
    if (ended.status !== 'completed') throw new Exit(1);
  });
  routeVerb(machines, 'pin <agent-pin>', 'machines', 'update', {
    about: 'set the only agent version that upgrades may install on a machine; "any" allows all versions',
    examples: ['1.2.3', 'any'],
    input: (options) => (options['agent-pin'] === 'any' ? { agent_pin: null } : {}),
  });
  routeVerb(machines, 'hold', 'machines', 'update', {
    about: 'make upgrades skip a machine',
    examples: ['', '--release'],
    flags: { '--release': 'let upgrades include the machine again' },
    input: ({ release }) => ({ agent_hold: !release }),
  });
}

export function addUpgrades(program: Command): void {
  const upgrades = program.command('upgrades').description('inspect and cancel upgrades of agents');
  routeVerb(upgrades, 'list', 'upgrades', 'list', {
    examples: ['--status running', '--machine web-1'],
    flags: {
      ...ofMachine,
      '--status <running|completed|failed|cancelled>': 'only upgrades with this status',
      ...latest,
    },
    view: {
      fields: 'id status version wave machines started=created_at',
      cells: {
        wave: waveText,
        machines: countsText,
      },
    },
  });
  routeVerb(upgrades, 'get', 'upgrades', 'get', { text: upgradeText });
  routeVerb(upgrades, 'machines', 'upgrades', 'machines', {
    examples: ['', '--status failed'],
    defaults: { sort: 'wave' },
    flags: {
      '--status <status>':
        'only machines with this status: waiting, offline, staging, busy, switching, upgraded, failed, skipped or cancelled',
      '--limit <count>': 'print at most COUNT machines (default: 50)',
    },
    view: { fields: 'machine=machine_name wave status reason from=from_version message' },
  });
  routeVerb(upgrades, 'cancel', 'upgrades', 'cancel', {
    about: 'cancel an upgrade; machines that are already starting the new version still get it',
    text: upgradeText,
  });
}

/**
 * Returns the position of the current wave among all waves, such as "2 of 5". The broker reports these numbers only to
 * a key that may use all machines of the upgrade.
 */
const waveText = ({ current_wave, waves }: Pick<Upgrade, 'current_wave' | 'waves'>): string =>
  waves === null ? 'unknown' : `${current_wave} of ${waves}`;

const countsText = ({ counts }: Pick<Upgrade, 'counts'>): string =>
  Object.entries(counts)
    .filter(([, count]) => count > 0)
    .map(([status, count]) => `${count} ${status}`)
    .join(', ');

/** Returns an upgrade as text, with the machines that have failed or were skipped. */
async function upgradeText(upgrade: Upgrade, client: Farhand): Promise<string> {
  const text = await record({
    id: upgrade.id,
    status: upgrade.status,
    version: upgrade.version,
    wave: `${waveText(upgrade)} (${upgrade.wave})`,
    'next wave': upgrade.next_wave_at && when(upgrade.next_wave_at),
    machines: countsText(upgrade),
    started: when(upgrade.created_at),
    ended: upgrade.finished_at && when(upgrade.finished_at),
  });
  const lines: string[] = [];
  for (const status of ['failed', 'skipped'] as const) {
    if (upgrade.counts[status] === 0) continue;
    const { items } = await client.upgrades.machines({
      ...{ upgrade_id: upgrade.id, status, sort: 'wave', limit: mostFailures },
    });
    for (const { machine_name, machine_id, reason, message } of items)
      lines.push(clean(`${status}: ${machine_name || machine_id}: ${message ?? reason ?? ''}`));
    const others = upgrade.counts[status] - items.length;
    if (others > 0) lines.push(`${status}: ${others} more; see farhand upgrades machines ${upgrade.id}`);
  }
  return [text, ...lines].join('\n');
}

/** Prints the progress of an upgrade until it ends. If a signal ends this program, the upgrade continues. */
async function followUpgrade(client: Farhand, upgrade: Upgrade): Promise<Upgrade> {
  const upgrade_id = upgrade.id;
  const { isTTY } = process.stderr;
  const stopping = new AbortController();
  let code = 0;
  const forget = onStop((as) => {
    code = as;
    stopping.abort();
  });
  const goesOn = `the upgrade goes on; farhand upgrades get ${upgrade_id} prints it, farhand upgrades cancel ${upgrade_id} cancels it`;
  let line = '';
  try {
    for (let now = upgrade; ; now = await client.upgrades.get({ upgrade_id })) {
      const next = `wave ${waveText(now)}: ${countsText(now)}`;
      if (isTTY) writeNow('stderr', `\r\x1b[K${next}`);
      else if (next !== line) hint(next);
      line = next;
      if (now.finished_at !== null) return now;
      await sleep(pollMs, stopping.signal);
      if (stopping.signal.aborted) throw new Exit(code, goesOn);
    }
  } catch (error) {
    throw error instanceof FarhandError
      ? new Exit(1, `${error.message} (${error.code}); ${goesOn}`, { cause: error })
      : error;
  } finally {
    if (isTTY) writeNow('stderr', '\n');
    forget();
  }
}

const uploadSpec = {
  about: 'upload signed agent packages to the broker; each needs its .sig file beside it',
  examples: ['farhand packages upload dist/packages/farhand-agent-1.2.3-linux-x64.tar.gz'],
};

export function addPackages(program: Command): void {
  const packages = program.command('packages').description('manage the agent packages used for upgrades');
  routeVerb(packages, 'list', 'packages', 'list', {
    flags: { '--limit <count>': 'print at most COUNT packages (default: 50)' },
    view: {
      fields: 'file version arch kind size signed_by uploaded',
      cells: { file: ({ id }) => id, size: (one) => size(one.size), signed_by: keyText },
    },
  });
  verb(packages, 'upload <files...>', uploadSpec, async (client, files, { output }) => {
    const stored = [];
    for (const file of files) {
      await access(file);
      const signature = await signatureOf(file);
      const content = await openAsBlob(file);
      stored.push(await client.packages.upload({ package: basename(file), signature, content }));
    }
    await printView(client, output, stored, { fields: 'file=id version arch kind signed_by' });
  });
  routeVerb(packages, 'delete', 'packages', 'remove', { destroys: ['delete the package', 'deleted'] });
}

function signatureOf(file: string): Promise<string> {
  return readFile(`${file}.sig`, 'utf8').catch((error: unknown) => {
    if (!isErrno(error, 'ENOENT')) throw atPath(error, `${file}.sig`);
    const why = `the package is not signed: there is no ${file}.sig beside it`;
    throw new StartError(
      `${why}; build it with npm run package -- --sign-key FILE, and upload it from dist/packages`,
      1,
    );
  });
}

/** Returns the first 16 digits of the signing key's fingerprint. The JSON output contains all digits. */
const keyText = ({ signed_by }: { signed_by: string | null }): string | null =>
  signed_by && `${signed_by.slice(0, 16)}…`;
