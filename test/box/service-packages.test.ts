// The Debian packages and the install line on a booted Debian. Each test continues with the state that the tests before
// it left.
import { copyFileSync, readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { freeAddress } from '../find-free-ports.ts';
import { type Answer, call } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { containerOfFile } from './boot-container.ts';
import { buildPackages, built } from './build-packages.ts';

const box = containerOfFile();

describe('on a booted Debian', { timeout: 120_000 }, () => {
  let http = '';
  let key = '';
  let machine = '';

  const api = (method: string, path: string, body?: unknown): Promise<Answer> =>
    call(`http://${http}/api/v1${path}`, method, { key, body });
  const online = (): Promise<void> =>
    waitFor(async () => expect((await api('GET', `/machines/${machine}`)).body.data.status).toBe('online'), {
      interval: 200,
    });
  const says = async (command: string): Promise<string> =>
    (await api('POST', '/commands', { machine_id: machine, command })).body.data.stdout;
  const property = async (name: string): Promise<string> =>
    (await box.run('systemctl', 'show', 'farhand-agent', '--value', `--property=${name}`)).stdout.trim();
  const machineId = async (): Promise<string> =>
    JSON.parse((await box.run('farhand-agent', 'status', '-o', 'json')).stdout).machine_id;
  /** Returns the paths of files named after Farhand, except packages and the broker's own folder. */
  const traces = async (name: string): Promise<string> => {
    const places = ['/etc', '/home', '/opt/farhand-agent', '/root', '/run', '/usr', '/var'];
    const carried = ['!', '-path', '/usr/lib/farhand-broker/*', '!', '-path', '/root/*.deb'];
    return (await box.run('find', ...places, '-name', `*${name}*`, ...carried)).stdout;
  };

  test('the broker’s package becomes a service, and an agent from its package links to the broker', async () => {
    buildPackages();
    for (const name of readdirSync(built).filter((one) => one.endsWith('.deb')))
      copyFileSync(join(built, name), join(box.root, 'root', name.replace(/_.*/, '.deb')));
    expect(await box.run('dpkg', '--install', '/root/farhand-broker.deb')).toMatchObject({ code: 0 });
    const grpc = await freeAddress();
    http = await freeAddress();
    const installed = await box.run('farhand-broker', 'install', '--http', http, '--grpc', grpc);
    expect(installed).toMatchObject({ code: 0, stderr: '' });
    const data = ['--data-dir', '/var/lib/farhand-broker'];
    const made = await box.run('farhand', 'auth', 'create-key', '--name', 'test', ...data);
    key = /service_apikey_\w+/.exec(made.stdout)?.[0] ?? '';
    const { token } = (await api('POST', '/join-tokens', {})).body.data;
    writeFileSync(join(box.root, 'root/token'), token, { mode: 0o600 });
    expect(await box.run('dpkg', '--install', '/root/farhand-agent.deb')).toMatchObject({ code: 0 });
    const joined = await box.run(
      'farhand-agent',
      'install',
      '--broker',
      grpc,
      '--join-token-file',
      '/root/token',
    );
    expect(joined).toMatchObject({ code: 0, stderr: '' });
    machine = await machineId();
    expect(await says('id -un')).toBe('farhand-agent\n');
    expect(await property('ExecStart')).toContain('path=/usr/bin/farhand-agent ;');
  });

  test('the broker’s console works without Node on the machine and without a separate web server', async () => {
    expect((await box.run('which', 'node', 'npm')).stdout).toBe('');
    const page = await call(`http://${http}/console/`, 'GET', { headers: { Accept: 'text/html' } });
    expect([page.status, page.headers.get('content-security-policy')]).toEqual([
      200,
      expect.stringContaining("default-src 'none'; script-src 'self'"),
    ]);
    const named = [...String(page.body).matchAll(/(?:src|href)="([^"]+)"/g)].map(
      ([, address = '']) => address,
    );
    expect(named.filter((address) => !/^(\/console\/assets\/|data:)/.test(address))).toEqual([]);
    const folder = (
      await box.run('find', '/usr/lib/farhand-broker', '-path', '*/console/assets')
    ).stdout.trim();
    const assets = readdirSync(join(box.root, folder)).filter((name) => /\.(js|css)$/.test(name));
    const scripts = assets.filter((name) => name.endsWith('.js'));
    for (const name of assets) {
      const { status, headers, body } = await call(`http://${http}/console/assets/${name}`, 'GET');
      expect([name, status, headers.get('cache-control')]).toEqual([
        name,
        200,
        'public, max-age=31536000, immutable',
      ]);
      const imported = [...String(body).matchAll(/(?:from|import\()"\.\/([\w.-]+\.js)"/g)].map(
        ([, file]) => file,
      );
      expect(imported.filter((file) => file === undefined || !scripts.includes(file))).toEqual([]);
    }
    const first = named.map((address) => address.replace('/console/assets/', ''));
    expect(first.filter((name) => assets.includes(name))).toHaveLength(2);
  });

  test('an upgrade restarts the service with its new unit, as the same machine', async () => {
    const before = await property('MainPID');
    const unit = '/etc/systemd/system/farhand-agent.service';
    await box.run('sed', '-i', 's/^Description=.*/Description=old/', unit);
    expect(await box.run('dpkg', '--install', '/root/farhand-agent.deb')).toMatchObject({ code: 0 });
    expect(await property('MainPID')).not.toBe(before);
    expect(await property('Description')).toBe('Farhand agent');
    await online();
    expect(await machineId()).toBe(machine);
  });

  test('a removed package leaves its data, and a purged package leaves nothing', async () => {
    expect(await box.run('dpkg', '--remove', 'farhand-agent')).toMatchObject({ code: 0 });
    expect((await box.run('systemctl', 'is-active', 'farhand-agent')).stdout.trim()).toBe('inactive');
    expect(await traces('identity.json')).toBe('/var/lib/farhand-agent/identity.json\n');
    const back = await box.run('dpkg', '--install', '/root/farhand-agent.deb');
    expect(back).toMatchObject({ code: 0, stderr: expect.not.stringContaining('try-restart') });
    expect(await box.run('farhand-agent', 'install')).toMatchObject({ code: 0 });
    expect(await machineId()).toBe(machine);
    // The install line replaces the program of the package. The service then starts the new program with the old
    // settings.
    const settings = await box.run('cat', '/etc/farhand/agent.toml');
    const moved = await box.run('sh', '-c', `curl -fsSL http://${http}/install.sh | sh`);
    expect(moved).toMatchObject({ code: 0 });
    expect(await property('ExecStart')).toContain('path=/usr/local/bin/farhand-agent ;');
    expect((await box.run('cat', '/etc/farhand/agent.toml')).stdout).toBe(settings.stdout);
    // The service and its data now belong to the install line. So purging the package does not remove them.
    expect(await box.run('dpkg', '--purge', 'farhand-agent')).toMatchObject({ code: 0 });
    await online();
    expect(await machineId()).toBe(machine);
    expect(await box.run('dpkg', '--install', '/root/farhand-agent.deb')).toMatchObject({ code: 0 });
    expect(await box.run('/usr/bin/farhand-agent', 'install')).toMatchObject({ code: 0 });
    // The installed package takes the service over from the program in /opt. Its `uninstall` also removes that program.
    expect(await box.run('/usr/bin/farhand-agent', 'uninstall', '--keep-data')).toMatchObject({ code: 0 });
    expect((await box.run('ls', '/opt/farhand-agent', '/usr/local/bin/farhand-agent')).code).toBe(2);
    expect(await box.run('farhand-agent', 'install')).toMatchObject({ code: 0 });
    expect(await box.run('dpkg', '--purge', 'farhand-agent')).toMatchObject({ code: 0 });
    expect(await traces('farhand-agent')).toBe('');
    expect((await box.run('getent', 'passwd', 'farhand-agent')).code).toBe(2);
  });

  test('the install line installs the agent, and upgrades it when run again; uninstall leaves nothing', async () => {
    const { install } = (await api('POST', '/join-tokens', { name: 'web-1' })).body.data;
    // Already root, and the container has no sudo.
    const line = install.replace('sudo sh', 'sh');
    const installed = await box.run('sh', '-c', line);
    expect(installed).toMatchObject({ code: 0 });
    machine = await machineId();
    expect((await api('GET', `/machines/${machine}`)).body.data.name).toBe('web-1');
    expect(await says('id -un')).toBe('farhand-agent\n');
    expect(await property('ExecStart')).toContain('path=/usr/local/bin/farhand-agent ;');
    const before = await property('MainPID');
    const again = await box.run('sh', '-c', `curl -fsSL http://${http}/install.sh | sh`);
    expect(again).toMatchObject({ code: 0 });
    expect(await property('MainPID')).not.toBe(before);
    await online();
    // The broker now offers other packages, as after an upgrade of the broker. The same line installs the new agent.
    const packages = '/usr/lib/farhand-broker/packages';
    const other =
      'cp farhand-agent-*.tar.gz farhand-agent-other.tar.gz && sha256sum *.tar.gz > new && mv new SHA256SUMS';
    expect(await box.run('sh', '-c', `cd ${packages} && ${other}`)).toMatchObject({ code: 0 });
    expect(await box.run('sh', '-c', line)).toMatchObject({ code: 0 });
    await online();
    expect(await machineId()).toBe(machine);
    const program = await box.run('readlink', '/opt/farhand-agent/current');
    const failed = await box.run(
      'sh',
      '-c',
      `curl -fsSL http://${http}/install.sh | sh -s -- --no-such-flag`,
    );
    expect(failed).toMatchObject({
      code: 2,
      stderr: expect.stringContaining('the previous version was restored'),
    });
    expect(await box.run('readlink', '/opt/farhand-agent/current')).toEqual(program);
    await online();
    expect(await box.run('farhand-agent', 'uninstall')).toMatchObject({ code: 0, stderr: '' });
    await box.run('rm', `${packages}/farhand-agent-other.tar.gz`);
    expect(await traces('farhand-agent')).toBe('');
  });

  test('a purged broker leaves nothing', async () => {
    expect(await box.run('dpkg', '--purge', 'farhand-broker')).toMatchObject({ code: 0 });
    expect(await traces('farhand')).toBe('');
    expect((await box.run('grep', '-l', 'farhand', '/etc/passwd', '/etc/group', '/etc/shadow')).stdout).toBe(
      '',
    );
  });
});
