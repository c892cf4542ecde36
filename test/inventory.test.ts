// The inventory of machines, over HTTP from a real agent on this machine, compared with the machine's own tools.
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { createServer as createHttpServer } from 'node:http';
import { createServer } from 'node:net';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { parseUnits, readContainers } from '../agent/inventory/failed-units-and-containers.ts';
import {
  parseApkDatabase,
  parseApkVersions,
  parseAptSimulation,
  parseDnfList,
  parsePacmanUpdates,
  parseZypperTable,
} from '../agent/inventory/packages-and-updates.ts';
import { parseSockets } from '../agent/inventory/ports.ts';
import { runProgram } from '../agent/inventory/run-program.ts';
import { parseOsRelease } from '../agent/inventory/system.ts';
import { refusalIn } from './all-routes.ts';
import { shared } from './close-after-tests.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { needs } from './skip-without-programs.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

const printed = (program: string, ...args: string[]): string =>
  execFileSync(program, args, { encoding: 'utf8', env: { ...process.env, LC_ALL: 'C' } }).trim();

const readProcess = (path: string): string => (existsSync(path) ? readFileSync(path, 'utf8') : '');

const never = new AbortController().signal;

// ---- Refused requests

test('a machine that has no stored inventory and cannot be asked gives a clear error', async () => {
  const system = await startFarhand();
  const old = await scriptedMachine(system, { methods: ['ListFiles'] });
  const path = (id: string): string => `/machines/${id}/inventory`;
  const refused = await system.call('GET', path(old.identity.machineId));
  expect(refusalIn(refused)).toBe('501 not_supported');
  expect(refused.body.error.details).toMatchObject({ method: 'GetInventory' });
  const closed = await system.agent({ flags: ['--allow', 'metrics'] });
  const forbidden = await system.call('GET', path(closed.machineId));
  expect(refusalIn(forbidden)).toBe('403 permission_denied');
  expect(forbidden.body.error.details).toMatchObject({ capability: 'inventory' });
  await closed.close();
  expect(refusalIn(await system.call('GET', path(closed.machineId)))).toBe('503 machine_offline');
  const { key } = await system.keyed(['machines:read'], { machine_ids: [closed.machineId] });
  expect(refusalIn(await system.call('GET', path(old.identity.machineId), { key }))).toBe('403 forbidden');
});

test('an inventory that breaks the limits is refused, and nothing of it is stored', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { machineId } = agent.identity;
  const answers = [
    {},
    { system: { package_format: 'msi' } },
    { system: {}, ports: [{ protocol: 'tcp', port: 65_536 }] },
    { system: {}, packages: [{ name: 'x'.repeat(257) }] },
  ];
  for (const answer of answers) {
    const asked = system.call('GET', `/machines/${machineId}/inventory`);
    const call = await agent.next('call');
    const messages = [agent.encode('GetInventory', answer)];
    agent.send({ reply: { call_id: call.call_id, messages: { messages } } });
    expect(refusalIn(await asked), JSON.stringify(answer).slice(0, 80)).toBe('503 machine_error');
  }
  const { items } = await system.client.inventory.list();
  expect(items).toMatchObject([{ machine_id: machineId, collected_at: null, facts: null, packages: [] }]);
});

test('version_below without a package is refused', async () => {
  const system = await startFarhand();
  expect(refusalIn(await system.call('GET', '/inventory?version_below=1'))).toBe('400 invalid_request');
});

test('a program that fails, prints too much or hangs is reported with a reason, and its process group is killed', async () => {
  const run = (script: string) => runProgram('sh', ['-c', script], { signal: never });
  await expect(run('echo no rights >&2; exit 3')).rejects.toThrow('sh ended with 3: no rights');
  await expect(run('yes')).rejects.toThrow(/printed more than/);
  await expect(runProgram('no-such-program', [], { signal: never })).rejects.toThrow('is not installed');
  const stop = new AbortController();
  const file = join(temporaryFolder('hanging'), 'pid');
  const script = `sleep 600 & echo $! > ${file}.new; mv ${file}.new ${file}; wait`;
  const hanging = runProgram('sh', ['-c', script], { signal: stop.signal });
  await expect.poll(() => existsSync(file)).toBe(true);
  stop.abort();
  await expect(hanging).rejects.toThrow('sh was stopped');
  const state = () =>
    /^State:\s+([RSDTt])/m.exec(readProcess(`/proc/${readFileSync(file, 'utf8').trim()}/status`));
  await expect.poll(state).toBeNull();
});

// ---- One machine

/** The inventory of this machine. It is collected once, because apt takes seconds. */
const collectedHere = shared(async () => {
  const { system, machine_id } = await startWithAgent();
  const port = await listenOnLoopback(createServer());
  const found = await system.client.inventory.get({ machine_id });
  return { system, found, port };
});

test('the inventory agrees with the machine’s own tools', async () => {
  const { found, port } = await collectedHere();
  expect(found).toMatchObject({ kernel: printed('uname', '-r'), arch: printed('uname', '-m') });
  expect(found.hostname).toBe(hostname());
  const release = printed('sh', '-c', '. /etc/os-release; echo "$ID|$VERSION_ID|$PRETTY_NAME"');
  expect([found.os_id, found.os_version, found.os_name].join('|')).toBe(release);
  expect(found.cpu_cores).toBe(Number(printed('getconf', '_NPROCESSORS_ONLN')));
  const kilobytes = Number(printed('awk', '/^MemTotal/ { print $2 }', '/proc/meminfo'));
  expect(found.memory_bytes).toBe(1024 * kilobytes);
  const boot = Number(printed('awk', '/^btime/ { print $2 }', '/proc/stat'));
  expect(Math.abs(Date.parse(found.booted_at) / 1000 - boot)).toBeLessThan(2);
  const own = found.ports.filter((one) => one.port === port);
  expect(own).toMatchObject([{ protocol: 'tcp', address: '127.0.0.1', pid: process.pid }]);
  expect(found.interfaces.every(({ name }) => existsSync(join('/sys/class/net', name)))).toBe(true);
  expect(Math.abs(Date.now() - Date.parse(found.collected_at))).toBeLessThan(600_000);
});

needs('dpkg-query', 'apt-get')('packages and updates are those of dpkg and apt', async () => {
  const { found } = await collectedHere();
  // biome-ignore lint/suspicious/noTemplateCurlyInString: dpkg-query replaces these names
  const format = '${db:Status-Status} ${Package} ${Version} ${Architecture}\\n';
  const listed = printed('dpkg-query', '-W', '-f', format).split('\n');
  const installed = listed.filter((line) => line.startsWith('installed '));
  expect(found.package_format).toBe('deb');
  expect(found.packages.map((one) => `installed ${one.name} ${one.version} ${one.arch}`).sort()).toEqual(
    installed.sort(),
  );
  const summary = printed('apt-get', '-s', '-q', '-o', 'Debug::NoLocking=true', 'dist-upgrade');
  const pending = Number(/^(\d+) upgraded,/m.exec(summary)?.[1]);
  const part = found.incomplete.find(({ part }) => part === 'updates');
  expect([found.updates.length, part]).toEqual([pending, undefined]);
});

needs('lscpu', 'ss')('processor and ports are those of lscpu and ss', async () => {
  const { system, found } = await collectedHere();
  const model = /^Model name:\s*(.*)$/m.exec(printed('lscpu'))?.[1];
  if (process.arch === 'x64') expect(found.cpu_model).toBe(model);
  const ports = new Set(found.ports.map(({ port }) => port));
  // Compares only the port of this broker, because other tests open and close ports.
  const own = Number(new URL(system.url).port);
  expect(printed('ss', '-Hltn')).toContain(`:${own} `);
  expect(ports).toContain(own);
});

test('the stored inventory is answered until a refresh, also for an offline machine', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { machineId: machine_id } = agent.identity;
  const read = (refresh: 'true' | 'false' = 'false') => system.client.inventory.get({ machine_id, refresh });
  const [first] = await Promise.all([read(), answering(agent, 'deb', [['bash', '1']])]);
  expect(await read()).toEqual(first);
  // Two requests at once share one collection, so the machine gets one call.
  const refreshed = Promise.all([read('true'), read('true')]);
  await answering(agent, 'deb', [['bash', '2']]);
  const [second, same] = await refreshed;
  expect(second.packages).toMatchObject([{ name: 'bash', version: '2' }]);
  expect(Date.parse(second.collected_at)).toBeGreaterThan(Date.parse(first.collected_at));
  expect(same).toEqual(second);
  agent.control.cancel();
  await expect.poll(async () => (await system.client.machines.get({ machine_id })).status).toBe('offline');
  expect(await read()).toEqual(second);
  const refused = await system.call('GET', `/machines/${machine_id}/inventory?refresh=true`);
  expect(refusalIn(refused)).toBe('503 machine_offline');
});

test('a stored inventory is not sent once the machine’s owner disallows it, and is deleted with the machine', async () => {
  const system = await startFarhand();
  const before = await system.agent();
  const { machineId: machine_id, dataDir } = before;
  await system.client.inventory.get({ machine_id });
  await before.close();
  const after = await system.agent({ dataDir, flags: ['--allow', 'metrics'] });
  expect(refusalIn(await system.call('GET', `/machines/${machine_id}/inventory`))).toBe(
    '403 permission_denied',
  );
  const { items, without_inventory } = await system.client.inventory.list();
  expect(items).toMatchObject([{ machine_id, facts: null }]);
  expect(without_inventory).toBe(1);
  await after.close();
  await system.agent({ dataDir });
  expect((await system.client.inventory.list()).items).toMatchObject([
    { facts: { kernel: expect.any(String) } },
  ]);
  await system.client.machines.remove({ machine_id });
  expect((await system.client.inventory.list()).items).toEqual([]);
  const events = await system.client.events.list({ type: 'machine.removed' });
  expect(events.total).toBe(1);
});

// ---- Inventories of many machines

test('a package is found on the machines that have it, below a version, page by page', async () => {
  const system = await startFarhand();
  const { client } = system;
  const one = await collected(system, 'one', 'deb', [
    ['openssl', '3.0.9-1'],
    ['bash', '5.2'],
  ]);
  const two = await collected(system, 'two', 'deb', [['openssl', '3.0.15-1~deb12u1']]);
  const three = await collected(system, 'three', 'rpm', [['openssl', '1:3.0.7-27.el9']]);
  const none = await collected(system, 'four', 'apk', [['bash', '5.2.21-r0']]);
  const ids = async (query: object) =>
    (await client.inventory.list(query)).items.map((item) => item.machine_id);
  const uncollected = await system.agent({ tags: 'new' });
  const without = async (query: object, by = client) =>
    (await by.inventory.list({ limit: 1, ...query })).without_inventory;
  expect(await without({ package: 'openssl' })).toBe(1);
  expect(await without({ package: 'openssl', tags: 'new' })).toBe(1);
  expect(await without({ tags: 'old' })).toBe(0);
  await client.machines.remove({ machine_id: uncollected.machineId });
  expect(await without({})).toBe(0);
  expect(await ids({ package: 'openssl' })).toEqual([one, three, two]);
  expect(await ids({ package: 'openssl', version_below: '3.0.15' })).toEqual([one, three]);
  // This limit has the epoch 1, so epochs are compared as well. A version without an epoch is older.
  expect(await ids({ package: 'openssl', version_below: '1:3.0.7-27' })).toEqual([one, two]);
  expect(await ids({ package: 'openss' })).toEqual([]);
  expect(await ids({ package: 'bash', sort: '-machine_name' })).toEqual([one, none]);
  const page = await client.inventory.list({ package: 'openssl', limit: 1, offset: 1 });
  expect([page.total, page.items[0]?.machine_id]).toEqual([3, three]);
  expect(page.items[0]).toMatchObject({
    machine_name: 'three',
    packages: [{ name: 'openssl', version: '1:3.0.7-27.el9' }],
    facts: { package_format: 'rpm' },
    updates: 0,
  });
  const { client: limited } = await system.keyed(['machines:read'], { machine_ids: [two] });
  expect((await limited.inventory.list()).items.map((item) => item.machine_id)).toEqual([two]);
  expect((await limited.inventory.list({ package: 'bash' })).total).toBe(0);
  expect(await without({}, limited)).toBe(0);
});

test('a refresh of the list asks the connected machines, and forgets packages that are gone', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answered = answering(agent, 'deb', [
    ['gone', '1'],
    ['stays', '1'],
  ]);
  expect((await system.client.inventory.list({ package: 'gone', refresh: 'true' })).total).toBe(1);
  await answered;
  const again = answering(agent, 'deb', [['stays', '2']]);
  expect((await system.client.inventory.list({ package: 'gone', refresh: 'true' })).total).toBe(0);
  await again;
  const { items } = await system.client.inventory.list({ package: 'stays' });
  expect(items[0]?.packages.map(({ version }) => version)).toEqual(['2']);
});

type System = Awaited<ReturnType<typeof startFarhand>>;
type Scripted = Awaited<ReturnType<typeof scriptedMachine>>;

/** Answers the next call of GetInventory with these packages. */
async function answering(
  agent: Scripted,
  package_format: string,
  packages: [string, string][],
): Promise<void> {
  const call = await agent.next('call');
  const answer = {
    system: { package_format },
    packages: packages.map(([name, version]) => ({ name, version })),
  };
  const messages = [agent.encode('GetInventory', answer)];
  agent.send({ reply: { call_id: call.call_id, messages: { messages } } });
}

/** A machine whose stored inventory has these packages. */
async function collected(
  system: System,
  name: string,
  format: string,
  packages: [string, string][],
): Promise<string> {
  const agent = await scriptedMachine(system);
  const machine_id = agent.identity.machineId;
  await system.client.machines.update({ machine_id, name });
  const answered = answering(agent, format, packages);
  await system.client.inventory.get({ machine_id });
  await answered;
  return machine_id;
}

// ---- Memory before the first request

test('before the first request no code that collects is loaded, and the heap grows by less than 1 MiB', () => {
  const script = `
    import { readFileSync } from 'node:fs';
    import { registerHooks } from 'node:module';
    const loaded = [];
    registerHooks({ load(url, context, next) { loaded.push(url); return next(url, context); } });
    const running = () => [process.getActiveResourcesInfo(), readFileSync('/proc/thread-self/children', 'utf8')];
    const heapKiB = () => {
      gc();
      return process.memoryUsage().heapUsed / 1024;
    };
    // Leaves out modules that other parts of the agent load as well.
    await import('./shared/semaphore.ts');
    const [memory, idle] = [heapKiB(), running()];
    const { createInventory } = await import('./agent/inventory/index.ts');
    const handlers = createInventory();
    const [grown, started] = [heapKiB() - memory, running()];
    await import('./agent/start.ts');
    const own = () => loaded.filter((url) => url.includes('/agent/inventory/')).map((url) => url.split('/').at(-1));
    const before = own();
    // Stops the package manager at once, because apt takes seconds.
    await Array.fromAsync(handlers.getInventory({}, { signal: AbortSignal.abort() })).catch(() => {});
    console.log(JSON.stringify({ before, grown, idle, started, collects: own().includes('collect.ts') }));`;
  const root = join(import.meta.dirname, '..');
  const args = [
    '--disable-warning=ExperimentalWarning',
    '--expose-gc',
    '--input-type=module',
    '--eval',
    script,
  ];
  const output = JSON.parse(execFileSync(process.execPath, args, { encoding: 'utf8', cwd: root }));
  expect(output).toMatchObject({ before: ['index.ts'], started: output.idle, collects: true });
  // The typical value is 40 KiB.
  expect(output.grown).toBeLessThan(1024);
});

// ---- Output of package managers that this machine may not have

test('updates of apt, dnf, zypper, apk and pacman are read from their output', () => {
  const apt = `Inst libc6 [2.36-9+deb12u8] (2.36-9+deb12u9 Debian:12.9/stable [amd64]) []
Inst linux-image-6.1.0-30-amd64 (6.1.124-1 Debian-Security:12/stable-security [amd64])
Conf libc6 (2.36-9+deb12u9 Debian:12.9/stable [amd64])`;
  expect(parseAptSimulation(apt)).toEqual([
    { name: 'libc6', installed: '2.36-9+deb12u8', available: '2.36-9+deb12u9' },
  ]);
  const dnf = `
bash.x86_64                 5.2.26-4.fc40             updates
python3.12-libs.i686        3.12.4-1.fc40             updates-testing
Obsoleting Packages
grub2-tools.x86_64          1:2.06-120.fc40           updates`;
  expect(parseDnfList(dnf)).toEqual([
    { id: 'bash.x86_64', available: '5.2.26-4.fc40' },
    { id: 'python3.12-libs.i686', available: '3.12.4-1.fc40' },
  ]);
  // dnf 5 writes this heading in lower case.
  expect(parseDnfList(dnf.replace('Obsoleting Packages', 'Obsoleting packages'))).toHaveLength(2);
  const zypper = `S | Repository | Name    | Current Version | Available Version | Arch
--+------------+---------+-----------------+-------------------+-------
v | Main       | openssl | 3.1.4-1.1       | 3.1.4-2.1         | x86_64`;
  expect(parseZypperTable(zypper)).toEqual([
    { name: 'openssl', installed: '3.1.4-1.1', available: '3.1.4-2.1' },
  ]);
  const database = parseApkDatabase(
    'C:Q1abc=\nP:musl\nV:1.2.4-r0\nA:x86_64\nT:the C library\n\nP:ssl-client\nV:1\n\n',
  );
  expect(database).toEqual([
    { name: 'musl', version: '1.2.4-r0', arch: 'x86_64' },
    { name: 'ssl-client', version: '1', arch: '' },
  ]);
  const apk = 'Installed:                Available:\nmusl-1.2.4-r0           < 1.2.4-r2\n';
  expect(parseApkVersions(apk, database)).toEqual([
    { name: 'musl', installed: '1.2.4-r0', available: '1.2.4-r2' },
  ]);
  expect(parsePacmanUpdates('linux 6.6.1-1 -> 6.6.2-1 [ignored]\n')).toEqual([
    { name: 'linux', installed: '6.6.1-1', available: '6.6.2-1' },
  ]);
});

test('listening sockets are read from the tables of the kernel, addresses of IPv6 in their short form', () => {
  const line = (local: string, state: string) => `   0: ${local} 0:0 ${state} 0:0 00:0 0 0 0 4242 1 x`;
  const table = ['  sl  local_address', line('0100007F:1F90', '0A'), line('0100007F:1F91', '01'), ''].join(
    '\n',
  );
  expect(parseSockets(table, 'tcp')).toEqual([
    { protocol: 'tcp', address: '127.0.0.1', port: 8080, inode: '4242' },
  ]);
  const six = [
    'sl',
    line('B80D0120000000000000000001000000:0035', '07'),
    line(`${'0'.repeat(32)}:0016`, '07'),
  ];
  expect(parseSockets(six.join('\n'), 'udp').map(({ address, port }) => [address, port])).toEqual([
    ['2001:db8::1', 53],
    ['::', 22],
  ]);
});

test('os-release with quotes, failed units and containers are read', async () => {
  const release = parseOsRelease('NAME="Fedora \\"Linux\\""\nVERSION_ID=40\nID=\'fedora\'\n# no value\n');
  expect(release).toEqual({ NAME: 'Fedora "Linux"', VERSION_ID: '40', ID: 'fedora' });
  const units =
    'nginx.service loaded failed failed A high performance web server\nx.mount loaded failed failed /x\n';
  expect(parseUnits(units)).toEqual([
    { name: 'nginx.service', description: 'A high performance web server' },
    { name: 'x.mount', description: '/x' },
  ]);
  const path = join(temporaryFolder('containers'), 'docker.sock');
  const asked: (string | undefined)[] = [];
  const service = createHttpServer((request, response) => {
    asked.push(request.url);
    response.end(
      JSON.stringify([{ Id: 'a'.repeat(64), Names: ['/web'], Image: 'nginx:1', State: 'running' }, null]),
    );
  });
  service.listen(path);
  await once(service, 'listening');
  onTestFinished(() => void service.close());
  expect(await readContainers([path, `${path}.missing`])).toEqual([
    { id: 'a'.repeat(12), name: 'web', image: 'nginx:1', state: 'running' },
    { id: '', name: '', image: '', state: '' },
  ]);
  expect(asked).toEqual(['/containers/json?all=1']);
});
