// A machine without systemd: what install.sh, `farhand-agent install` and `farhand-agent doctor` say and leave there.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { agentSettings } from '../../agent/settings-schema.ts';
import { examineUpgrades } from '../../agent/upgrade/checks-for-doctor.ts';
import { upgradePaths } from '../../agent/upgrade/files-shared-with-root.ts';
import { scriptFor } from '../../broker/agent-packages/install-line-and-script.ts';
import { joinTokenText } from '../../shared/join-token.ts';
import { readSettings } from '../../shared/read-settings.ts';
import { shippedProgram } from '../bundled-programs.ts';
import { temporaryFolder } from '../start-farhand.ts';

const hasSystemd = existsSync('/run/systemd/system');

describe.skipIf(hasSystemd)('without systemd (needs a machine where systemd does not run)', () => {
  test.each([
    [[], '--broker b.test:8421 --join-token-file FILE'],
    [['--name', "it's web"], String.raw`--broker b.test:8421 --join-token-file FILE --name 'it'\''s web'`],
    [['--broker', 'c.test:1'], '--join-token-file FILE --broker c.test:1'],
    [
      ['--user', 'root', '--allow-sudo', '--allow', 'metrics', '--user=x', '--trust-key', 'k'],
      '--broker b.test:8421 --join-token-file FILE --allow metrics',
    ],
  ])('install.sh with %j installs nothing and prints how to do without a service', (options, command) => {
    const place = join(temporaryFolder('opt'), 'farhand-agent');
    const addresses = { url: 'http://127.0.0.1:1', grpc: 'b.test:8421', publicGrpc: 'b.test:8421', pin: '' };
    const input = scriptFor(addresses).replaceAll('/opt/farhand-agent', place);
    const { status, stderr } = spawnSync('sh', ['-s', '--', ...options], { input, encoding: 'utf8' });
    const [why, other, next, ...more] = stderr.split('\n');
    expect([status, why]).toEqual([1, expect.stringContaining('systemd does not run on this machine')]);
    expect(other).toContain('--no-service');
    expect(next).toMatch(/by hand, with the join token in FILE: /);
    expect(next?.endsWith(`: farhand-agent ${command}`)).toBe(true);
    expect([more, existsSync(place)]).toEqual([[''], false]);
  });

  test('farhand-agent install prints the command that starts the agent by hand, and makes no file', () => {
    const home = temporaryFolder('home');
    writeFileSync(join(home, 'my token'), joinTokenText('x'.repeat(43), '0'.repeat(64), undefined));
    const limits = '--allow metrics,files:read --root /srv --user root --log-level debug'.split(' ');
    const argv = ['install', '--broker', 'b.test:8421', '--join-token-file', 'my token', ...limits];
    const { status, stderr } = spawnSync(process.execPath, [shippedProgram('farhand-agent'), ...argv], {
      ...{ cwd: home, encoding: 'utf8' },
      env: { HOME: home, PATH: process.env.PATH },
    });
    expect([status, stderr]).toEqual([
      1,
      "farhand-agent: install needs systemd, which does not run on this machine; start the agent without a service: farhand-agent --broker b.test:8421 --join-token-file 'my token' --allow 'metrics,files:read' --root /srv --log-level debug\n",
    ]);
    expect(readdirSync(home)).toEqual(['my token']);
  });

  test('farhand-agent doctor does not advise to install a service', () => {
    const directory = temporaryFolder('upgrade');
    const { incoming, installed } = upgradePaths(directory);
    mkdirSync(incoming);
    writeFileSync(installed, JSON.stringify({ kind: 'tar.gz' }));
    const argv = ['--broker', 'b.test:8421', '--upgrade-dir', directory];
    const [upgrades] = examineUpgrades(readSettings(agentSettings, { argv, env: {} }));
    expect(upgrades).toMatchObject({ state: 'warn', check: 'upgrades' });
    expect(JSON.stringify(upgrades)).toContain('upgrade this agent by hand');
    expect(JSON.stringify(upgrades)).not.toContain('farhand-agent install');
  });
});
