// A broker with signed packages of a few bytes, and scripted machines that receive them and report what the test
// chooses.
import { randomBytes } from 'node:crypto';
import { expect } from 'vitest';
import type { AnswerResponse__Output } from '../proto/types/farhand/link/v1/AnswerResponse.ts';
import type { Hello } from '../proto/types/farhand/link/v1/Hello.ts';
import type { LastUpgrade } from '../proto/types/farhand/link/v1/LastUpgrade.ts';
import type { Farhand } from '../shared/sdk/index.ts';
import { joinScripted, linkScripted, type ScriptedAgent } from './scripted-agent.ts';
import { makeSigner, type Signer } from './sign-packages.ts';
import { startFarhand, type TestSystem } from './start-farhand.ts';

// Used by tests in the folders below.
export { makeSigner as signingKey, type Signer as SigningKey } from './sign-packages.ts';

type Upgrade = Awaited<ReturnType<Farhand['upgrades']['get']>>;

/** Returns the file name, bytes and signature file of a package. */
export function packageOf(
  version: string,
  key: Signer,
  bytes: Buffer<ArrayBuffer> = Buffer.from(randomBytes(700_000)),
) {
  const signed = key.sign(bytes, { version, arch: 'x64' });
  const [public_key, signature] = [signed.public_key.toString('base64'), signed.signature.toString('base64')];
  const text = JSON.stringify({ ...signed, public_key, signature });
  return { file: `farhand-agent-${version}-linux-x64.tar.gz`, bytes, signature: text, sha256: signed.sha256 };
}

export async function startUpgradeSystem(options: Parameters<typeof startFarhand>[0] = {}) {
  const system = await startFarhand(options);
  const key = makeSigner();
  return { ...system, signing: key, ...upgradesOf(system, key) };
}

/** Helpers for tests of upgrades on one broker. */
export function upgradesOf(system: TestSystem, key: Signer) {
  const { client } = system;
  return {
    /** Uploads a package of this version, signed with the key that the machines trust. Resolves with its bytes. */
    async upload(version: string, by = key): Promise<Buffer> {
      const { file, bytes, signature } = packageOf(version, by);
      await client.packages.upload({ package: file, signature, content: bytes });
      return bytes;
    },
    machine: (name = 'web-1', hello: Partial<Hello> = {}) => machineOf(system, key, name, hello),
    /** Starts an upgrade without a pause between its waves. */
    upgrade: (input: NonNullable<Parameters<Farhand['upgrades']['create']>[0]>): Promise<Upgrade> =>
      client.upgrades.create({ version: '9.0.0', pause: 0, ...input }),
    /** Resolves with an upgrade after its end. */
    async ended(upgrade_id: string): Promise<Upgrade> {
      const read = () => client.upgrades.get({ upgrade_id });
      await expect.poll(async () => (await read()).finished_at, { interval: 10 }).not.toBeNull();
      return read();
    },
    /** Resolves with the status of each machine by name, followed by the reason if there is one. */
    async outcomes(upgrade_id: string): Promise<Record<string, string>> {
      const { items } = await client.upgrades.machines({ upgrade_id, limit: 100 });
      return Object.fromEntries(
        items.map(({ machine_name, status, reason }) => [
          machine_name,
          reason ? `${status}: ${reason}` : status,
        ]),
      );
    },
  };
}

export interface Delivery {
  upgradeId: string;
  bytes: Buffer;
  /** Reports that the package has arrived. */
  staged(): void;
  busy(processes: number): void;
  switching(): void;
  fail(code: string, reason: string): void;
  /** Resolves when the broker has cancelled the call. */
  cancelled: Promise<unknown>;
}

export interface ScriptedMachine {
  id: string;
  name: string;
  agent: ScriptedAgent;
  /** Resolves with the next package that the broker sends. */
  next(): Promise<Delivery>;
  /** Receives the next package, and reports that the machine switches to it. Resolves with the id of the upgrade. */
  take(): Promise<string>;
  leave(): void;
  /** Links again with this version of the agent, and reports this last upgrade. */
  back(agent_version?: string, last?: LastUpgrade): Promise<void>;
  /** Receives the next package, switches to it, and reports the outcome. */
  upgrade(outcome?: 'SUCCEEDED' | 'ROLLED_BACK' | 'FAILED', to?: string): Promise<void>;
}

async function machineOf(
  system: TestSystem,
  key: Signer,
  name: string,
  hello: Partial<Hello>,
): Promise<ScriptedMachine> {
  const identity = await joinScripted(system, name);
  const link = async (more: Partial<Hello> = {}, last?: LastUpgrade): Promise<ScriptedAgent> => {
    const installation = {
      ...{ kind: 'PACKAGE_KIND_TAR_GZ' as const, upgrade_unit: true, trusted_key: key.fingerprint },
      ...(last && { last_upgrade: last }),
    };
    return linkScripted(system.grpc, identity, { installation, ...hello, ...more });
  };
  const machine: ScriptedMachine = {
    ...{ id: identity.machineId, name, agent: await link() },
    next: () => receive(machine.agent),
    async take() {
      const delivery = await machine.next();
      delivery.staged();
      delivery.switching();
      return delivery.upgradeId;
    },
    leave() {
      machine.agent.control.cancel();
      machine.agent.close();
    },
    async back(agent_version = '0.0.0', last) {
      machine.leave();
      machine.agent = await link({ agent_version }, last);
    },
    async upgrade(outcome = 'SUCCEEDED', to = '9.0.0') {
      const upgrade_id = await machine.take();
      const from_version = '0.0.0';
      const last = { upgrade_id, outcome: `UPGRADE_OUTCOME_${outcome}` as const, from_version };
      const reason = outcome === 'SUCCEEDED' ? '' : 'it did not link';
      await machine.back(outcome === 'SUCCEEDED' ? to : from_version, { ...last, to_version: to, reason });
    },
  };
  return machine;
}

/** Receives the package of one call. */
async function receive(agent: ScriptedAgent): Promise<Delivery> {
  const call = await agent.nextCallOf('StageUpgrade');
  const stream = agent.answer(call.call_id);
  const cancelled = new Promise((resolve) => stream.once('status', resolve));
  const chunks: Buffer[] = [];
  let upgradeId = '';
  await new Promise<void>((resolve, reject) => {
    stream.once('error', reject);
    stream.on('data', ({ message }: AnswerResponse__Output) => {
      if (!message) return;
      const { part, open, chunk } = agent.decode({ ...call, request: message }) as {
        part: string;
        open?: { upgrade_id: string };
        chunk?: Buffer;
      };
      if (open) upgradeId = open.upgrade_id;
      if (chunk) chunks.push(chunk);
      if (part === 'commit') resolve();
    });
  });
  const say = (response: object) => stream.write({ message: agent.encode('StageUpgrade', response) });
  return {
    ...{ upgradeId, bytes: Buffer.concat(chunks), cancelled },
    staged: () => void say({ staged: {} }),
    busy: (processes) => void say({ waiting: { processes } }),
    switching: () => void say({ switching: {} }),
    fail(code, reason) {
      stream.write({ error: { code, message: `refused: ${reason}`, details: JSON.stringify({ reason }) } });
      stream.end();
    },
  };
}
