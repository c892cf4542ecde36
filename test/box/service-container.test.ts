// Broker and agent as services of a real systemd in a container. Each test continues with the state that the tests
// before it left.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { beforeAll, describe, expect, test } from 'vitest';
import { version } from '../../shared/version.ts';
import { freeAddress } from '../find-free-ports.ts';
import { type Answer, call } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { containerOfFile, type Ran } from './boot-container.ts';

const box = containerOfFile();

describe('in a container with systemd', { timeout: 90_000 }, () => {
  const node = '/opt/farhand/node_modules/.bin/node';
  let http = '';
  let grpc = '';
  let key = '';
  let machine = '';

  const agent = (...args: string[]): Promise<Ran> => box.run(node, '/opt/farhand/agent/main.ts', ...args);
  const broker = (...args: string[]): Promise<Ran> => box.run(node, '/opt/farhand/broker/main.ts', ...args);
  const cli = (...args: string[]): Promise<Ran> =>
    box.run(node, '/opt/farhand/broker/cli/main.ts', ...args, '--data-dir', '/var/lib/farhand-broker');
  const api = (method: string, path: string, body?: unknown): Promise<Answer> =>
    call(`http://${http}/api/v1${path}`, method, { key, body });
  const joinToken = async (): Promise<string> => (await api('POST', '/join-tokens', {})).body.data.token;
  const exec = async (command: string, more: object = {}): Promise<Record<string, unknown>> =>
    (await api('POST', '/commands', { machine_id: machine, command, ...more })).body.data;
  const online = (): Promise<void> =>
    waitFor(async () => expect((await api('GET', `/machines/${machine}`)).body.data.status).toBe('online'), {
      interval: 200,
    });
  const property = async (unit: string, name: string): Promise<string> =>
    (await box.run('systemctl', 'show', unit, '--value', `--property=${name}`)).stdout.trim();
  /** Returns the paths of files named after Farhand, except journals and sources. */
  const traces = async (name: string): Promise<string[]> => {
    const { stdout } = await box.run(
      'find',
      '/etc',
      '/home',
      '/run',
      '/usr',
      '/var',
      '/root',
      '/tmp',
      '-name',
      `*${name}*`,
    );
    return stdout.split('\n').filter((path) => path !== '');
  };
  /**
   * Returns the pids of the processes `sleep SECONDS` of the container. They are the pids outside the container, as
   * this test sees them.
   */
  const sleepers = (seconds: number): number[] =>
    readdirSync('/proc')
      .filter((pid) => /^\d+$/.test(pid))
      .filter((pid) => {
        try {
          return readFileSync(`/proc/${pid}/cmdline`, 'latin1') === `sleep\0${seconds}\0`;
        } catch {
          return false;
        }
      })
      .map(Number);

  beforeAll(async () => {
    [http, grpc] = [await freeAddress(), await freeAddress()];
  });

  test('a failed installation of a broker leaves nothing', async () => {
    const refused = await broker('install', '--http', '0.0.0.0:8420');
    expect(refused.code).toBe(1);
    expect(refused.stderr).toContain('--insecure-http');
    expect(refused.stderr).toContain('\n  farhand-broker: --http');
    expect(refused.stderr).toContain('Everything that the installation had created was removed.');
    expect(await traces('farhand-broker')).toEqual([]);
    expect((await broker('status')).code).toBe(3);
    const pair = ['--tls-cert', '/root/x.pem', '--tls-key', '/root/x.pem'];
    const unread = await broker('install', '--http', '0.0.0.0:8420', ...pair);
    expect(unread.stderr).toContain('farhand-broker, must be able to read the certificate and its key');
    // A directory can exist before the installation, for example from `cluster join`. After a failed installation it
    // belongs to its earlier owner again.
    const data = '/var/lib/farhand-broker';
    await box.run('install', '-D', '-m', '600', '/dev/null', `${data}/directory-id`);
    expect((await broker('install', '--http', '0.0.0.0:8420')).code).toBe(1);
    const owners = await box.run('stat', '--format', '%u:%g', data, `${data}/directory-id`);
    expect(owners).toMatchObject({ code: 0, stdout: '0:0\n0:0\n' });
    await box.run('rm', '-r', data);
  });

  test('a program that the service could not read is refused', async () => {
    const launcher = 'printf "#!/bin/sh\\n" > /root/farhand && chmod +x /root/farhand';
    await box.run('sh', '-c', launcher);
    const where = ['FARHAND_PROGRAM=/root/farhand', node, '/opt/farhand/broker/main.ts', 'install'];
    const refused = await box.run('env', ...where);
    expect(refused).toMatchObject({
      code: 78,
      stderr: expect.stringContaining('cannot read files below /root'),
    });
    await box.run('rm', '/root/farhand');
  });

  test('the broker is installed, runs as its own user, and reports its addresses', async () => {
    // Root has a restrictive umask here, but the service must be able to read its files.
    const line = `umask 077; ${node} /opt/farhand/broker/main.ts install --http ${http} --grpc ${grpc} | head -n 1`;
    const installed = await box.run('sh', '-c', line);
    expect(installed).toMatchObject({ code: 0, stderr: '' });
    const { code, stdout } = await broker('status', '-o', 'json');
    expect(code).toBe(0);
    expect(JSON.parse(stdout)).toMatchObject({
      installed: true,
      active: true,
      enabled: true,
      user: 'farhand-broker',
      status: `REST on http://${http}, agents on ${grpc}`,
      version,
    });
    expect(await property('farhand-broker', 'Type')).toBe('notify');
    const made = await cli('auth', 'create-key', '--name', 'test');
    key = /service_apikey_\w+/.exec(made.stdout)?.[0] ?? '';
    expect((await api('GET', '/auth/me')).status).toBe(200);
  });

  test('installing a broker prints a command that logs in to it, with the pin of its own certificate', async () => {
    const { stdout } = await broker('install', '--tls');
    // The broker already has a key, so install does not print how to create a first one.
    expect(stdout).not.toContain('create a first API key');
    const printed =
      /^The broker’s API keys stay valid\..*: farhand (login https:.* --pin sha256\/\/.*)$/m.exec(stdout);
    const [, line = ''] = printed ?? [];
    const login = `echo ${key} | ${node} /opt/farhand/broker/cli/main.ts ${line} --key-stdin`;
    expect(await box.run('env', 'HOME=/tmp/home', 'sh', '-c', login)).toMatchObject({ code: 0 });
    expect((await broker('install', '--no-tls')).stdout).toContain(`farhand login http://${http}\n`);
  });

  test('the service reads the addresses of its machine, so that webhooks with its own port are checked', async () => {
    expect(await broker('install', '--webhook-allow', '192.0.2.0/24')).toMatchObject({ code: 0 });
    const port = http.split(':').at(-1);
    // No packet is sent to this address, because a disabled webhook sends nothing.
    const webhook = { url: `http://192.0.2.1:${port}/`, events: ['*'], enabled: false };
    expect(await api('POST', '/webhooks', webhook)).toMatchObject({ status: 201 });
    const itself = await api('POST', '/webhooks', { ...webhook, url: `http://localhost:${port}/` });
    expect(itself).toMatchObject({ status: 422 });
  });

  test('the log in the journal is text with levels, and both services may open many files', async () => {
    const { stdout } = await box.run('journalctl', '--unit=farhand-broker', '--output=json', '--no-pager');
    const entries = stdout
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line));
    expect(entries).toContainEqual(
      expect.objectContaining({
        PRIORITY: '6',
        SYSLOG_IDENTIFIER: 'farhand-broker',
        MESSAGE: expect.stringMatching(/^broker is up http=/),
      }),
    );
    expect(entries).toContainEqual(
      expect.objectContaining({ PRIORITY: '3', MESSAGE: expect.stringMatching(/^farhand-broker: --http/) }),
    );
    expect(await property('farhand-broker', 'LimitNOFILE')).toBe('65536');
  });

  test('a failed installation of an agent, with a refused token, leaves nothing', async () => {
    const token = (await joinToken()).replace(/_[0-9A-Za-z]{43}\./, `_${'A'.repeat(43)}.`);
    const refused = await agent('install', '--broker', grpc, '--join-token', token);
    expect(refused.code).toBe(1);
    expect(refused.stderr).toContain('join token is unknown');
    expect(refused.stderr).not.toContain(token);
    expect(refused.stderr).not.toContain('could be taken back');
    const without = await agent('install', '--broker', grpc);
    expect(without).toMatchObject({ code: 78, stderr: expect.stringContaining('--join-token-file') });
    expect(await traces('farhand-agent')).toEqual([]);
    expect((await box.run('getent', 'passwd', 'farhand-agent')).code).toBe(2);
  });

  test('an agent is installed and linked, and its token is in no file', async () => {
    const token = await joinToken();
    const installed = await box.run(
      'env',
      `FARHAND_JOIN_TOKEN=${token}`,
      node,
      '/opt/farhand/agent/main.ts',
      'install',
      '--broker',
      grpc,
      '--name',
      'box',
    );
    expect(installed).toMatchObject({ code: 0, stderr: '' });
    const status = JSON.parse((await agent('status', '--output', 'json')).stdout);
    machine = status.machine_id;
    expect(status).toMatchObject({ active: true, linked: true, user: 'farhand-agent' });
    expect((await api('GET', `/machines/${machine}`)).body.data).toMatchObject({
      name: 'box',
      status: 'online',
    });
    const secret = token.slice(0, 40);
    const { stdout } = await box.run(
      'grep',
      '-rlF',
      secret,
      '/etc',
      '/var/lib/farhand-agent',
      '/run/systemd',
    );
    expect(stdout).toBe('');
    expect(await property('farhand-agent', 'Environment')).toBe('');
  });

  test('a FIFO of the agent’s user in place of a file makes install fail instead of wait', async () => {
    const asAgent = (line: string): Promise<Ran> =>
      box.run('runuser', '-u', 'farhand-agent', '--', 'sh', '-c', line);
    await asAgent('cd /var/lib/farhand-agent && mkfifo join-token');
    const refused = { code: 78, stderr: expect.stringContaining('is not a regular file; remove it') };
    expect(await agent('install', '--join-token', await joinToken())).toMatchObject(refused);
    expect(await agent('install')).toMatchObject(refused);
    await asAgent(
      'cd /var/lib/farhand-agent && rm join-token && mv identity.json away && mkfifo identity.json',
    );
    expect(await agent('install')).toMatchObject(refused);
    await asAgent('cd /var/lib/farhand-agent && mv away identity.json');
    expect(await property('farhand-agent', 'LimitNOFILE')).toBe('524288');
  });

  test('commands run as the agent’s user, in a cgroup below the unit, without variables of systemd', async () => {
    const { stdout } = await exec(
      'id -un; pwd; cat /proc/self/oom_score_adj; grep 0:: /proc/self/cgroup; env',
    );
    const [user, directory, score, cgroup, ...env] = String(stdout).trim().split('\n');
    expect([user, directory, score]).toEqual(['farhand-agent', '/home/farhand-agent', '0']);
    expect(cgroup).toMatch(/^0::.*\/system.slice\/farhand-agent.service\/farhand-[\w-]+\/[0-9a-f]+-\d+$/);
    expect(env.join()).not.toMatch(/NOTIFY|WATCHDOG|INVOCATION|JOURNAL|TOKEN/);
  });

  test('a timeout and a stop of the unit end everything that a command has started', async () => {
    const tree = (seconds: number, first = ''): string =>
      `${first} (env -i setsid sleep ${seconds} </dev/null >/dev/null 2>&1 &); setsid sleep ${seconds} & sleep ${seconds}`;
    await exec(tree(87_001, "trap '' TERM;"), { wait: 500 });
    await waitFor(() => expect(sleepers(87_001)).toHaveLength(3));
    expect((await box.run('systemctl', 'stop', 'farhand-agent')).code).toBe(0);
    expect(sleepers(87_001)).toEqual([]);
    expect((await agent('status')).code).toBe(3);
    await box.run('systemctl', 'start', 'farhand-agent');
    await online();
    expect(await exec(tree(87_002), { timeout: 500 })).toMatchObject({ status: 'timeout' });
    expect(sleepers(87_002)).toEqual([]);
  });

  test('an agent that is killed, or hangs, is restarted', async () => {
    await exec('setsid sleep 87003 & sleep 87003', { wait: 300 });
    await box.run('systemctl', 'kill', '--signal=KILL', '--kill-whom=main', 'farhand-agent');
    await waitFor(async () => expect(await property('farhand-agent', 'NRestarts')).toBe('1'));
    await online();
    expect(sleepers(87_003)).toEqual([]);
    const override = '/run/systemd/system/farhand-agent.service.d';
    await box.run(
      'sh',
      '-c',
      `mkdir -p ${override} && printf '[Service]\\nWatchdogSec=3\\n' > ${override}/soon.conf`,
    );
    await box.run('systemctl', 'daemon-reload');
    await box.run('systemctl', 'restart', 'farhand-agent');
    await online();
    await box.run('systemctl', 'kill', '--signal=STOP', '--kill-whom=main', 'farhand-agent');
    await waitFor(async () => expect(await property('farhand-agent', 'NRestarts')).toBe('1'));
    await online();
    expect(String((await exec('echo back')).stdout)).toBe('back\n');
    await box.run('rm', '-r', override);
    await box.run('systemctl', 'daemon-reload');
  });

  test('a second install changes only the settings that it gets, and a failed one changes nothing', async () => {
    const bad = await agent('install', '--allow', 'everything');
    expect(bad.code).toBe(78);
    const nowhere = await agent('install', '--root', '/none');
    expect(nowhere).toMatchObject({ code: 78, stderr: expect.stringContaining('/none') });
    expect(await agent('install', '--allow', 'metrics,exec')).toMatchObject({ code: 0, stderr: '' });
    const { data } = (await api('GET', `/machines/${machine}`)).body;
    expect(data.capabilities.toSorted()).toEqual(['exec', 'metrics']);
    expect(data.name).toBe('box');
    const lost = await broker('install', '--http', '0.0.0.0:8420');
    expect(lost.stderr).toContain('The previous installation was restored.');
    expect(lost.stderr).not.toContain('broker is up');
    await online();
    // The file `more.toml` does not set `allow`, so the installed service keeps its value.
    await box.run('sh', '-c', 'printf \'log_level = "debug"\\n\' > /root/more.toml');
    expect(await agent('install', '--config', '/root/more.toml')).toMatchObject({ code: 0, stderr: '' });
    const kept = await box.run('cat', '/etc/farhand/agent.toml');
    expect(kept.stdout).toContain('allow = "metrics,exec"');
    expect(kept.stdout).toContain('log_level = "debug"');
  });

  test('granted rights stay until they are revoked, and so does what an administrator added', async () => {
    const dropIn = '/etc/systemd/system/farhand-agent.service.d/own.conf';
    await box.run('sh', '-c', `mkdir -p ${dropIn.replace('/own.conf', '')} && echo '[Service]' > ${dropIn}`);
    expect(await agent('install', '--allow-sudo')).toMatchObject({ code: 0 });
    expect(await agent('install', '--user', 'farhand-agent')).toMatchObject({ code: 0 });
    expect(await property('farhand-agent', 'NoNewPrivileges')).toBe('no');
    expect(await agent('install', '--no-allow-sudo')).toMatchObject({ code: 0 });
    expect(await property('farhand-agent', 'NoNewPrivileges')).toBe('yes');
    expect((await box.run('cat', dropIn)).stdout).toBe('[Service]\n');
  });

  test('status lines that a command forges are printed without control characters', async () => {
    await online();
    await exec(
      'NOTIFY_SOCKET=/run/systemd/notify systemd-notify --status="$(printf \'evil\\033[2Jtext\')"; sleep 1',
    );
    const { stdout } = await agent('status');
    expect(stdout).toContain('evil\ufffd[2Jtext');
    expect(stdout).not.toContain('\u001b');
    await box.run('systemctl', 'restart', 'farhand-agent');
    await online();
  });

  test('after a reboot broker and agent are linked again, with the same identity', async () => {
    await box.reboot();
    await online();
    expect(await exec('id -un')).toMatchObject({ stdout: 'farhand-agent\n', status: 'completed' });
  });

  test('running as root needs a flag, and then commands run as root', async () => {
    // The agent's user plants a symlink and a FIFO, which must not make root open other files or wait.
    const line = 'cd /var/lib/farhand-agent && ln -s /etc/passwd link && rm lock.db && mkfifo lock.db';
    await box.run('runuser', '-u', 'farhand-agent', '--', 'sh', '-c', line);
    const rooted = await agent('install', '--user', 'root');
    const left = ['/var/lib/farhand-agent', '(', '-type', 'l', '-o', '!', '-user', 'root', ')'];
    expect((await box.run('find', ...left)).stdout).toBe('');
    expect(rooted).toMatchObject({ code: 0 });
    expect(rooted.stdout).toContain('every API key that may run commands can run them as root');
    expect(await exec('id -un')).toMatchObject({ stdout: 'root\n' });
    expect(await property('farhand-agent', 'NotifyAccess')).toBe('main');
  });

  test('the agent of a removed machine stays stopped and reports why', async () => {
    expect((await api('DELETE', `/machines/${machine}`)).status).toBe(200);
    await waitFor(async () => expect(await property('farhand-agent', 'ActiveState')).toBe('failed'));
    expect(await property('farhand-agent', 'ExecMainStatus')).toBe('78');
    const { code, stdout } = await agent('status');
    expect(code).toBe(3);
    expect(stdout).toContain('has removed this machine');
    expect(await agent('install', '--join-token', await joinToken())).toMatchObject({ code: 0 });
    const again = JSON.parse((await agent('status', '-o', 'json')).stdout);
    expect(again).toMatchObject({ linked: true });
    expect(again.machine_id).not.toBe(machine);
    machine = again.machine_id;
  });

  test('an uninstalled agent leaves nothing, and neither does a purged broker', async () => {
    const left = box.run('runuser', '-u', 'farhand-agent', '--', 'sleep', '87004');
    await waitFor(() => expect(sleepers(87_004)).toHaveLength(1));
    const held = await agent('uninstall');
    expect(held).toMatchObject({ code: 1, stderr: expect.stringContaining('uninstall again') });
    expect(held.stdout).toContain(`farhand machines remove ${machine}\n`);
    expect((await box.run('ls', '/var/lib/farhand-agent')).code).toBe(2);
    for (const pid of sleepers(87_004)) process.kill(pid);
    await left;
    // The directory contains an unexpected file of another user.
    await box.run('sh', '-c', 'mkdir /var/lib/farhand-agent && mkfifo /var/lib/farhand-agent/identity.json');
    expect(await agent('uninstall')).toMatchObject({ code: 0, stderr: '' });
    expect(await traces('farhand-agent')).toEqual([]);
    expect((await broker('uninstall')).code).toBe(2);
    expect(await broker('uninstall', '--yes')).toMatchObject({ code: 0, stderr: '' });
    expect(existsSync(join(box.root, 'var/lib/farhand-broker/state.json'))).toBe(true);
    expect(await broker('uninstall', '--yes', '--purge')).toMatchObject({ code: 0, stderr: '' });
    expect(await traces('farhand')).toEqual([]);
    const accounts = await box.run('grep', '-l', 'farhand', '/etc/passwd', '/etc/group', '/etc/shadow');
    expect(accounts.stdout).toBe('');
    expect((await box.run('systemctl', 'list-units', '--all', '--no-legend', 'farhand*')).stdout).toBe('');
  });
});
