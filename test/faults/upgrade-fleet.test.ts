// Upgrades of 30 real agents, as processes of real packages. One package does not start, one starts and does not link,
// one has a wrong signature, and the broker is killed in the middle. No machine may be left without an agent.
// The test plays the role of root's upgrade unit, because the real one needs systemd (test/box/). It takes requests and
// verifies packages with the unit's own code, but starts processes instead of a service.
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { expect, onTestFinished, test, vi } from 'vitest';
import { agentSettings } from '../../agent/settings-schema.ts';
import {
  type UpgradeRequest,
  type UpgradeResult,
  upgradePaths,
} from '../../agent/upgrade/files-shared-with-root.ts';
import { dropRequest, takeRequest, verifiedCopy } from '../../agent/upgrade/root-unit/take-request.ts';
import { pinKey } from '../../agent/upgrade/trusted-key.ts';
import { sleep } from '../../shared/clock.ts';
import { readSettings } from '../../shared/read-settings.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { version as builtVersion } from '../../shared/version.ts';
import { shippedProgram } from '../bundled-programs.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { packageOf, type SigningKey, signingKey } from '../upgrades-fixture.ts';
import { startBrokerProgram } from './broker-program.ts';

vi.setConfig({ testTimeout: 300_000 });

const agents = 30;
/** Milliseconds that the test waits for the link of a new version before it goes back to the old one. */
const linkMs = 60_000;
/** A version that runs and never links. To save time, the test waits only `neverMs` milliseconds for its link. */
const neverLinks = '9.0.2';
const neverMs = 1_500;
const root = join(import.meta.dirname, '../..');

/** Makes the program directory of an agent of another version. `main` replaces the source of the program. */
function programOf(version: string, main?: string): string {
  const from = join(shippedProgram('farhand-agent'), '../..');
  const folder = temporaryFolder('program');
  if (main !== undefined) {
    mkdirSync(join(folder, 'lib'));
    writeFileSync(join(folder, 'lib/farhand-agent.js'), main);
    return folder;
  }
  cpSync(from, folder, { recursive: true, filter: (path) => !/\/(console|docs|share)$/.test(path) });
  for (const file of readdirSync(join(folder, 'lib'))) {
    const path = join(folder, 'lib', file);
    const text = readFileSync(path, 'utf8');
    const own = `name:"farhand",version:"${builtVersion}"`;
    if (text.includes(own)) writeFileSync(path, text.replace(own, `name:"farhand",version:"${version}"`));
  }
  return folder;
}

const archiveOf = (folder: string): Buffer<ArrayBuffer> =>
  Buffer.from(
    execFileSync('tar', ['-I', 'gzip -1', '-cf', '-', '-C', folder, ...readdirSync(folder)], {
      maxBuffer: 2 ** 30,
    }),
  );

/** A machine: its agent as a process, and a loop that replaces the agent in place of root's unit. */
class Machine {
  readonly #folder = temporaryFolder('machine');
  readonly #directory = join(this.#folder, 'upgrade');
  readonly #flags: string[];
  #agent: ReturnType<typeof program> | undefined;
  #home: string;
  readonly #stopping = new AbortController();
  /** Directories of unpacked versions, by version. Machines share them to save time. */
  readonly #unpacked: Map<string, string>;

  constructor(grpc: string, name: string, home: string, unpacked: Map<string, string>) {
    this.#home = home;
    this.#unpacked = unpacked;
    const dataDir = join(this.#folder, 'data');
    const where = ['--broker', grpc, '--data-dir', dataDir, '--upgrade-dir', this.#directory];
    this.#flags = [...where, '--name', name, '--tags', 'web'];
    onTestFinished(() => this.#stopping.abort());
  }

  /** Starts the agent for the first time, and the loop that takes requests in place of root's unit. */
  async begin(joinToken: string, key: SigningKey): Promise<void> {
    mkdirSync(upgradePaths(this.#directory).incoming, { recursive: true });
    writeFileSync(upgradePaths(this.#directory).installed, JSON.stringify({ kind: 'tar.gz' }));
    await pinKey(this.#directory, key.raw);
    expect(await this.#start(this.#home, ['--join-token', joinToken])).toBe(true);
    void this.#watch();
  }

  /** Starts an agent. Resolves with false if it ends or does not link in time. */
  async #start(home: string, more: string[] = [], ms = linkMs): Promise<boolean> {
    const main = relative(root, join(home, 'lib/farhand-agent.js'));
    const agent = program(main, [...this.#flags, ...more]);
    this.#agent = agent;
    const linked = agent.line('linked').then(
      () => true,
      () => false,
    );
    const ended = once(agent, 'exit').then(() => false);
    return Promise.race([linked, ended, sleep(ms, this.#stopping.signal).then(() => false)]);
  }

  async #end(): Promise<void> {
    const agent = this.#agent;
    if (!agent || agent.exitCode !== null || agent.signalCode !== null) return;
    agent.kill('SIGTERM');
    await once(agent, 'exit');
  }

  async #watch(): Promise<void> {
    while (!this.#stopping.signal.aborted) {
      const taken = await takeRequest(this.#directory);
      if (taken) await this.#apply(taken.request);
      await sleep(100, this.#stopping.signal);
    }
  }

  async #apply(request: UpgradeRequest): Promise<void> {
    const { upgrade_id, version: to_version } = request;
    const facts = { upgrade_id, from_version: builtVersion, to_version, reason: '' };
    this.#report({ ...facts, outcome: 'RUNNING' });
    try {
      const argv = [...this.#flags, '--join-token', 'x'];
      await verifiedCopy(this.#directory, request, readSettings(agentSettings, { argv, env: {} }));
    } catch (error) {
      this.#report({ ...facts, outcome: 'FAILED', reason: String(error) });
      return dropRequest(this.#directory);
    }
    await dropRequest(this.#directory);
    const home = this.#unpack(to_version);
    await this.#end();
    if (await this.#start(home, [], to_version === neverLinks ? neverMs : linkMs)) {
      this.#home = home;
      return this.#report({ ...facts, outcome: 'SUCCEEDED' });
    }
    await this.#end();
    this.#report({ ...facts, outcome: 'ROLLED_BACK', reason: 'it did not link' });
    await this.#start(this.#home);
  }

  #unpack(version: string): string {
    const known = this.#unpacked.get(version);
    if (known) return known;
    const home = join(this.#folder, version);
    mkdirSync(home);
    execFileSync('tar', ['-xzf', upgradePaths(this.#directory).copy, '-C', home]);
    this.#unpacked.set(version, home);
    return home;
  }

  #report(result: UpgradeResult): void {
    writeFileSync(upgradePaths(this.#directory).result, JSON.stringify(result));
  }
}

/** Starts a broker in a separate process. The test can kill it and start it again. */
async function startBroker() {
  const { grpc, http, key, kill, start } = await startBrokerProgram();
  return {
    grpc,
    client: new Farhand({ baseUrl: `http://${http}`, apiKey: key, retries: 5 }),
    async killAndStart() {
      await kill();
      await start();
    },
  };
}

/** Resolves with an upgrade after its end. */
async function ended(client: Farhand, upgrade_id: string) {
  const read = async () => (await client.upgrades.get({ upgrade_id })).finished_at;
  await expect.poll(read, { interval: 200, timeout: 200_000 }).not.toBeNull();
  return client.upgrades.get({ upgrade_id });
}

/** Returns the reasons of all machines that have a status. */
async function reasonsOf(client: Farhand, upgrade_id: string, status: 'failed' | 'cancelled') {
  const items = await Array.fromAsync(client.upgrades.machines({ upgrade_id, status, limit: 100 }));
  return [...new Set(items.map(({ reason }) => reason))];
}

/** Expects that each machine runs a command, and that its agent has this version. */
async function expectWorking(client: Farhand, version: string): Promise<void> {
  const online = async () => (await client.machines.list({ status: 'online' })).total;
  await expect.poll(online, { interval: 200, timeout: 60_000 }).toBe(agents);
  const { counts } = await client.batches.create({ tags: ['web'], command: 'true', wait: 50_000 });
  expect(counts).toMatchObject({ completed: agents });
  const machines = await Array.fromAsync(client.machines.list({ include: 'agent_version', limit: 100 }));
  expect(new Set(machines.map(({ agent_version }) => agent_version))).toEqual(new Set([version]));
}

test('30 agents are upgraded in waves over a killed broker, and bad packages stop in their first wave', async () => {
  const broker = await startBroker();
  const { client } = broker;
  const key = signingKey();
  const upload = async (version: string, folder: string, change = (text: string) => text) => {
    const { file, bytes, signature } = packageOf(version, key, archiveOf(folder));
    await client.packages.upload({ package: file, signature: change(signature), content: bytes });
  };
  await upload('9.0.1', programOf('9.0.1', 'process.exit(1);'));
  await upload(neverLinks, programOf(neverLinks, 'setInterval(() => {}, 1000);'));
  const other = Buffer.alloc(64).toString('base64');
  await upload('9.0.3', programOf('9.0.3'), (text) =>
    JSON.stringify({ ...JSON.parse(text), signature: other }),
  );
  await upload('9.0.4', programOf('9.0.4'));

  const { token } = await client.joinTokens.create({ uses: agents });
  const home = join(shippedProgram('farhand-agent'), '../..');
  const unpacked = new Map<string, string>();
  const names = Array.from({ length: agents }, (_, at) => `web-${at + 1}`);
  for (let at = 0; at < agents; at += 5)
    await Promise.all(
      names.slice(at, at + 5).map((name) => new Machine(broker.grpc, name, home, unpacked).begin(token, key)),
    );
  await expectWorking(client, builtVersion);

  const begin = (version: string, more: object = {}) =>
    client.upgrades.create({ tags: ['web'], version, wave: '10%', pause: 0, ...more });
  for (const [version, reason] of [
    ['9.0.1', 'rolled_back'],
    [neverLinks, 'rolled_back'],
    ['9.0.3', 'refused'],
  ] as const) {
    const { id } = await begin(version, { max_failures: 1 });
    const upgrade = await ended(client, id);
    expect([version, upgrade.status, upgrade.current_wave]).toEqual([version, 'failed', 1]);
    expect([version, upgrade.counts.upgraded]).toEqual([version, 0]);
    expect(await reasonsOf(client, id, 'failed')).toEqual([reason]);
    expect(await reasonsOf(client, id, 'cancelled')).toEqual(['max_failures']);
    await expectWorking(client, builtVersion);
  }

  const { id } = await begin('9.0.4', { wave: '50%' });
  const linked = async () => {
    const machines = await Array.fromAsync(client.machines.list({ include: 'agent_version', limit: 100 }));
    return machines.filter(({ agent_version }) => agent_version === '9.0.4').length;
  };
  // These machines report their outcome to the restarted broker when they link again.
  await expect.poll(linked, { interval: 200, timeout: 120_000 }).toBe(agents / 2);
  await broker.killAndStart();
  expect(await ended(client, id)).toMatchObject({
    ...{ status: 'completed', current_wave: 2, counts: { upgraded: agents, failed: 0 } },
  });
  await expectWorking(client, '9.0.4');
  const { total } = await client.events.list({ type: 'upgrade.machine_upgraded' });
  expect(total).toBe(agents);
});
