// farhand-agent doctor: the problems that it finds on an agent's machine, including a wrong clock.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text as read } from 'node:stream/consumers';
import { expect, onTestFinished, test } from 'vitest';
import { doctor } from '../../agent/doctor.ts';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { unusedBroker } from '../../agent/systemd-service.ts';
import { setClock } from '../../shared/clock.ts';
import { joinAdvice } from '../../shared/doctor/agent-checks.ts';
import { ofUnit } from '../../shared/doctor/service-check.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const day = 86_400_000;

function examine(dataDir: string, broker: string) {
  return doctor({ argv: ['--data-dir', dataDir, '--broker', broker], env: {} });
}

test('prints what is wrong with an agent and how to fix it, with exit code 1', async () => {
  const [system, other] = [await startFarhand(), await startFarhand()];
  const [agent, removed] = [await system.agent(), await system.agent()];
  await system.client.machines.remove({ machine_id: removed.machineId });
  await expect(removed.ended).rejects.toThrow();
  const [open, damaged] = [temporaryFolder('open'), temporaryFolder('damaged')];
  chmodSync(open, 0o755);
  writeFileSync(join(damaged, 'identity.json'), '{', { mode: 0o600 });
  const cases: [string, string, RegExp][] = [
    [open, system.grpc, /^fail {2}directory +other users can use .*chmod/ms],
    [
      temporaryFolder('empty'),
      system.grpc,
      /^fail {2}identity +this machine has not joined .*join-tokens create/ms,
    ],
    [
      join(open, 'new'),
      system.grpc,
      /^fail {2}directory .*check the path in --data-dir; if it is right, the first start creates/ms,
    ],
    [damaged, system.grpc, /^fail {2}identity +\S+ is damaged; remove it and join the broker again/ms],
    [
      removed.dataDir,
      system.grpc,
      /^fail {2}identity +mach_\w+ was removed from the broker.*join-tokens create/ms,
    ],
    [agent.dataDir, other.grpc, /^fail {2}broker .*another broker uses this address/ms],
    [
      agent.dataDir,
      '127.0.0.1:2',
      /^fail {2}broker +127\.0\.0\.1:2: .*ECONNREFUSED.*check that the broker runs/ms,
    ],
  ];
  for (const [dataDir, broker, text] of cases)
    expect(await examine(dataDir, broker)).toEqual({ code: 1, text: expect.stringMatching(text) });
});

test('prints its findings as JSON, each with its fix, for monitoring', async () => {
  const argv = ['--data-dir', temporaryFolder('empty'), '--broker', '127.0.0.1:2', '-o', 'json'];
  const { code, text } = await doctor({ argv, env: {} });
  const mend = expect.stringContaining('join-tokens create');
  expect(code).toBe(1);
  expect(JSON.parse(text)).toContainEqual(
    expect.objectContaining({ check: 'identity', state: 'fail', mend }),
  );
  const wrong = doctor({ argv: argv.with(-1, 'xml'), env: {} });
  await expect(wrong).rejects.toThrow('--output "xml"');
});

test('advises to join anew by install if the agent is a service, and by a start by hand if not', () => {
  expect(joinAdvice(true)).toMatch(
    /store the token in FILE, then run sudo farhand-agent install --join-token-file FILE$/,
  );
  expect(joinAdvice(false)).toMatch(
    /store the token in FILE, then run farhand-agent --join-token-file FILE --broker HOST:PORT$/,
  );
});

test('says of a failed service what its exit code means, with the status of the service at the end', () => {
  const failed = {
    installed: true,
    active: 'failed',
    status: 'a: wrong',
    exitStatus: 78,
    result: 'exit-code',
  };
  const what = (change = {}) => ofUnit('farhand-x', { ...failed, ...change }, 'it was removed').what;
  expect(what()).toBe('farhand-x is failed (it was removed): a: wrong');
  expect(what({ exitStatus: 1, status: '' })).toBe('farhand-x is failed (exit-code)');
  expect(what({ active: 'active', status: 'linked' })).toBe('farhand-x is active: linked');
});

test('install warns if the agent is linked by a stored address instead of those of --broker', () => {
  const link = { broker: 'a:1', machineId: 'mach_1' };
  expect(unusedBroker(link, ['b:7777'])).toMatch(/^--broker b:7777 is not in use: .* linked to a:1, /);
  expect(unusedBroker(link, ['b:7777', 'a:1'])).toBeUndefined();
  expect(unusedBroker({ ...link, machineId: undefined }, ['b:7777'])).toBeUndefined();
});

test('finds nothing wrong with a linked agent when run as `farhand-agent doctor`', async () => {
  const system = await startFarhand();
  const { dataDir, machineId } = await system.agent();
  const main = join(import.meta.dirname, '../../agent/main.ts');
  const flags = ['--data-dir', dataDir, '--broker', system.grpc];
  const child = spawn(process.execPath, [main, 'doctor', ...flags], { stdio: ['ignore', 'pipe', 'inherit'] });
  const [text, [code]] = await Promise.all([read(child.stdout), once(child, 'exit')]);
  expect([code, text]).toEqual([0, expect.stringContaining(`ok    identity   ${machineId}\n`)]);
  expect(text).toMatch(/^ok {4}broker +\S+ answers, and is the broker that this machine has joined$/m);
});

test('an agent whose clock is behind the broker’s certificate reports its clock, when it links and when it joins', async () => {
  const first = await startFarhand();
  const agent = await first.agent();
  await first.broker.close();
  onTestFinished(() => setClock());
  setClock({
    now: () => Date.now() + 3 * day,
    monotonic: () => performance.now(),
    after(ms, run) {
      const timer = setTimeout(run, ms).unref();
      return () => clearTimeout(timer);
    },
  });
  const system = await startFarhand({ dataDir: first.dataDir, flags: ['--grpc', first.grpc] });
  setClock();
  const fault = /certificate is not yet valid by the clock of this machine \(20\d\d-\S+Z\); set the clock/;
  await waitFor(() => expect(agent.logged.join('')).toMatch(fault));
  const params = { broker: system.grpc, joinToken: await system.joinToken(), name: 'late', tags: [] };
  await expect(loadIdentity(temporaryFolder('late'), params)).rejects.toThrow(fault);
  const { text, code } = await examine(agent.dataDir, system.grpc);
  expect([code, text]).toEqual([
    1,
    expect.stringMatching(/^fail {2}clock .*\n[\s\S]*clock: run timedatectl/m),
  ]);
  expect(text).toMatch(fault);
});
