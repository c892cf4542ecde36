// farhand, verb by verb: keys, machines, commands, schedules, webhooks, events. Also checks that every verb has a test.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Command } from 'commander';
import { describe, expect, test } from 'vitest';
import { createProgram } from '../../broker/cli/verb-tree.ts';
import { createLine } from '../cli-fixture.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { startReceiver } from '../webhook-receivers.ts';

async function startScene() {
  const system = await startFarhand();
  const agent = await system.agent({ name: 'web-1', tags: 'web' });
  return { system, agent, farhand: createLine(system) };
}

// ---- Wrong arguments

describe('the command line', () => {
  test('wrong usage exits with 2, suggests a correction, and names the help of its verb', async () => {
    const farhand = createLine();
    const wrong: [string, string[], RegExp][] = [
      ['machnes', [], /Did you mean machines\?/],
      ['machines lst', [], /Did you mean list\?/],
      ['machines get', [], /missing required argument 'machine'/],
      ['machines list', ['--colour'], /unknown option '--colour'/],
      ['exec', ['web-1', 'uname', '-sr'], /unknown option '-sr'\nPut the command after "--"/],
      ['machines list', ['-o', 'xml'], /Allowed choices are text, json/],
      ['exec', ['web-1', 'uptime'], /put the command after "--"/],
      ['exec', ['web-1', '--timeout', '5', '--', 'uptime'], /300ms, 5m or 24h\.\nSee farhand exec --help/],
      ['machines list', ['--tags', ''], /It must have at least one tag/],
      ['inventory', ['--tags', ','], /It must have at least one tag/],
      ['saved-commands run', ['s1', '--machine', '', '--tags', 'web'], /choose the machines either by name/],
      ['exec', ['--', 'uptime'], /choose the machines either by name or by --tags/],
      [
        'exec',
        ['web-1', '--timeout', 'soon', '--', 'uptime'],
        /'--timeout <duration>' argument 'soon' is invalid. It must be a duration/,
      ],
      ['files cat', ['/etc/hosts'], /is not a remote path; use MACHINE:PATH/],
      ['files put', ['alone'], /give at least two paths/],
      ['webhooks redeliver', ['hook_1'], /choose either the id of a delivery or --since/],
      ['events', ['--since', '5'], /argument '5' is invalid. It must be a time/],
      ['audit', ['--since', '2026-02-30'], /It must be a time/],
      ['login', ['http://127.0.0.1:1'], /ask for input; add --key-stdin/],
      ['login', [], /add the URL and --key-stdin/],
      ['constructor', [], /unknown command/],
      ['files find', ['web-1:/'], /--name GLOB or --content TEXT/],
      ['webhooks test', [''], /WEBHOOK is empty; farhand webhooks list prints the ids/],
      ['auth revoke-key', [' '], /KEY is empty; farhand auth list-keys prints the ids/],
      ['machines tag', ['web-1', 'web'], /missing required argument 'tags'/],
      ['machines tag', ['web-1', 'web', 'eu'], /Allowed choices are add, remove, set/],
    ];
    const env = { FARHAND_URL: 'http://127.0.0.1:1', FARHAND_API_KEY: 'k' };
    for (const batch of [wrong.slice(0, 6), wrong.slice(6, 12), wrong.slice(12)]) {
      await Promise.all(
        batch.map(async ([verb, args, said]) => {
          const { code, err, out } = await farhand(verb, args, { env });
          expect([verb, code, out], err).toEqual([verb, 2, '']);
          expect(err).toMatch(said);
          expect(err).toMatch(/\nSee farhand( [\w-]+)* --help.\n$/);
        }),
      );
    }
  });

  test('an error has the next step if no broker is configured, answers or accepts the key', async () => {
    const { system, farhand } = await startScene();
    const limited = await system.keyed(['machines:read']);
    const [spaced, noUrl, nowhere, unreachable, stranger, limits] = await Promise.all([
      farhand('machines list', [], { env: { FARHAND_API_KEY: 'a b' } }),
      farhand('machines list', [], { env: { FARHAND_URL: 'http://me:word@127.0.0.1:2' } }),
      createLine()('machines list'),
      farhand('machines list', [], { env: { FARHAND_URL: 'http://127.0.0.1:2' } }),
      farhand('machines list', [], { env: { FARHAND_API_KEY: 'service_apikey_unknown' } }),
      farhand('auth list-keys', [], { env: { FARHAND_API_KEY: limited.key } }),
    ]);
    for (const { code, err } of [spaced, noUrl])
      expect([code, err]).toEqual([78, expect.stringMatching(/^farhand: .*FARHAND_API_KEY.*\n$/)]);
    expect([nowhere.code, nowhere.err]).toEqual([78, expect.stringContaining('farhand login URL')]);
    expect([unreachable.code, unreachable.err]).toEqual([
      1,
      expect.stringMatching(/no answer from http:\/\/127.0.0.1:2.*\n.*doctor/),
    ]);
    expect([stranger.code, stranger.err]).toEqual([
      1,
      expect.stringMatching(/unauthorized, request req_\w+\)\n.*login/),
    ]);
    expect([limits.code, limits.err]).toEqual([
      1,
      expect.stringMatching(/forbidden, request req_\w+\)\n.*whoami/),
    ]);
    for (const { err } of [nowhere, unreachable, stranger, limits])
      expect(err).not.toMatch(/service_apikey_\w| {4}at /);
  });

  test('an irreversible verb asks for a confirmation, and without a terminal needs --yes', async () => {
    const { system, agent, farhand } = await startScene();
    const key = await system.client.keys.create({ name: 'other', scopes: ['machines:read'] });
    const token = await system.client.joinTokens.create({});
    const schedule = await system.client.schedules.create({
      name: 'backup',
      machine_id: agent.machineId,
      command: 'true',
      cron: '@daily',
    });
    const answers = await Promise.all([
      farhand('machines remove', ['web-1']),
      farhand('auth revoke-key', [key.id]),
      farhand('join-tokens revoke', [token.id]),
      farhand('files rm', ['web-1:/tmp/x']),
      farhand('schedules delete', ['backup']),
      farhand('schedules delete', [schedule.id]),
      farhand('webhooks delete', ['hook_x']),
    ]);
    for (const { code, err } of answers)
      expect([code, err]).toEqual([2, expect.stringContaining('add --yes')]);
    for (const { err } of answers.slice(4, 6))
      expect(err).toContain(`remove the schedule backup (${schedule.id})`);
    expect((await system.client.schedules.list()).total).toBe(1);
    expect((await system.client.machines.get({ machine_id: agent.machineId })).name).toBe('web-1');
    expect((await system.client.keys.list()).total).toBe(2);
  });

  test('control characters of a machine are replaced, and colours respect NO_COLOR', async () => {
    const { system, agent, farhand } = await startScene();
    const folder = temporaryFolder('names');
    await system.client.commands.create({
      machine_id: agent.machineId,
      command: `mkdir ${folder}/x; touch "${folder}/x/$(printf 'a\\033[2Jb')" "${folder}/x/c\u061c\u200b\u2028d"`,
    });
    const disks = [{ mount: '/a\u001b[2Jb\nstatus', filesystem: 'x', space: { total: 2, used: 1, free: 1 } }];
    const metrics = { recorded_at_ms: 1, cpu_cores: 1, memory: {}, disk: {}, disks };
    const { identity } = await scriptedMachine(system, { metrics });
    const [json, status, piped, forced, both] = await Promise.all([
      farhand('files ls', [`web-1:${folder}/x`, '-o', 'json']),
      farhand('machines status', [identity.machineId]),
      farhand('files ls', [`web-1:${folder}/x`]),
      farhand('machines list', [], { env: { FORCE_COLOR: '1' } }),
      farhand('machines list', [], { env: { FORCE_COLOR: '1', NO_COLOR: '1' } }),
    ]);
    expect(piped.out).toContain('a\ufffd[2Jb');
    expect(status.out).toContain('disk /a\ufffd[2Jb\ufffdstatus');
    expect(json.out).toContain('"name": "c\\u061c\\u200b\\u2028d"');
    expect(JSON.parse(json.out)).toContainEqual(expect.objectContaining({ name: 'c\u061c\u200b\u2028d' }));
    expect(piped.out).toContain('c\ufffd\ufffd\ufffdd');
    expect(piped.out + both.out).not.toContain('\u001b');
    expect(forced.out).toContain('\u001b[32monline');
  });
});

// ---- Verb by verb

test('machines are listed, inspected, tagged, renamed and removed, by id or by name', async () => {
  const { system, agent, farhand } = await startScene();
  await system.agent({ name: 'db-1', tags: 'db' });
  const [unknown, list, tagged, one, status] = await Promise.all([
    farhand('machines get', ['web-9']),
    farhand('machines list'),
    farhand.json('machines list', ['--tags', 'web', '--status', 'online']),
    farhand.json('machines get', [agent.machineId]),
    farhand('machines status', ['web-1']),
  ]);
  expect([unknown.code, unknown.err]).toEqual([
    1,
    'farhand: no machine is named web-9; names: db-1, web-1\n',
  ]);
  expect(list.out.split('\n').map((row) => row.split(/ +/)[0])).toEqual(['NAME', 'db-1', 'web-1', '']);
  expect(tagged).toEqual([expect.objectContaining({ name: 'web-1' })]);
  expect(one).toMatchObject({ id: agent.machineId, name: 'web-1', capabilities: expect.any(Array) });
  expect(status.out).toMatch(/^status +online$/m);
  expect(status.out).toMatch(/^memory +[\d.]+ GiB of [\d.]+ GiB \(\d+ %\)$/m);
  expect(status.out).toMatch(/^disk \/ +[\d.]+ \w+ used, [\d.]+ \w+ available of [\d.]+ \w+ \(\d+ %\)$/m);
  const [statuses, fewest, tags] = await Promise.all([
    farhand('machines statuses', ['--tags', 'web']),
    farhand.json('machines statuses', ['--sort', '-memory', '--limit', '1']),
    farhand('machines tags'),
  ]);
  expect(statuses.out).toMatch(/^web-1 +online +\d+ % +\d+ % +\d+ % +[\d.]+ +\S.* now$/m);
  expect(fewest).toEqual([expect.objectContaining({ latest: expect.any(Object) })]);
  expect(tags.out).toMatch(/^NAME +MACHINES\ndb +1\nweb +1$/m);
  expect((await farhand.json('machines tag', ['add', 'web-1', 'eu,prod'])).tags).toEqual([
    'web',
    'eu',
    'prod',
  ]);
  expect((await farhand.json('machines tag', ['remove', 'web-1', 'eu', 'web'])).tags).toEqual(['prod']);
  expect((await farhand.json('machines tag', ['set', 'web-1', 'a'])).tags).toEqual(['a']);
  expect((await farhand.json('machines rename', ['web-1', 'db-1'])).name).toBe('db-1');
  expect((await farhand('broker list')).out).toMatch(/^URL +STATUS +MACHINES +LINKED +LEASE UNTIL +ID\n$/);
  const [ambiguous, strange] = await Promise.all([
    farhand('machines get', ['db-1']),
    farhand('machines tag', ['mend', agent.machineId, 'x']),
  ]);
  expect([ambiguous.code, ambiguous.err]).toEqual([
    1,
    expect.stringMatching(/several machines are named db-1; .* \(online, last seen .* ago\), /),
  ]);
  expect(strange.code).toBe(2);
  const [, strangely] = [await system.agent({ name: 'mach_db' }), await system.agent({ name: 'eu:db' })];
  expect((await farhand.json('machines get', ['mach_db'])).name).toBe('mach_db');
  expect((await farhand('files cat', ['eu:db:/etc/hosts'])).err).toMatch(
    /no machine is named eu; names: .*eu:db/,
  );
  for (const name of ['mach_db', strangely.machineId]) await farhand.json('machines remove', [name, '--yes']);
  expect(await farhand.json('machines remove', [agent.machineId, '--yes'])).toEqual({ deleted: true });
  expect((await system.client.machines.list()).total).toBe(1);
});

test('an inventory is printed, searched for a package, and exported without formulas and templates', async () => {
  const system = await startFarhand();
  const farhand = createLine(system);
  const machine = await scriptedMachine(system);
  const { machineId: machine_id } = machine.identity;
  await system.client.machines.update({ machine_id, name: '=web-{{1}}', tags: ['web'] });
  const early = await farhand('inventory', ['--package', 'openssl']);
  expect(early.err).toBe('farhand: 1 of 1 machine has no inventory; add --refresh to collect it\n');
  expect(Object.values((await farhand.json('inventory', ['--format', 'ansible'])).all.hosts)).toEqual([
    { ansible_host: '127.0.0.1', farhand_machine_id: machine_id },
  ]);
  const asked = farhand('machines inventory', ['=web-{{1}}']);
  const { call_id } = await machine.next('call');
  const answer = {
    system: { os_id: '{{7*7}}', os_name: 'Debian', kernel: '6.1', package_format: 'deb' },
    packages: [{ name: 'openssl', version: '3.0.9' }],
    ports: [{ protocol: 'tcp', address: '::', port: 22, process: 'sshd' }],
  };
  machine.send({ reply: { call_id, messages: { messages: [machine.encode('GetInventory', answer)] } } });
  const { out } = await asked;
  for (const line of [/^kernel +6\.1$/m, /^packages +1 \(deb\)$/m, /^port tcp :: 22 +sshd$/m])
    expect(out).toMatch(line);
  const [wrong, list, csv, ansible] = await Promise.all([
    farhand('inventory', ['--version-below', '1']),
    farhand('inventory', ['--tags', 'web', '--package', 'openssl', '--version-below', '3.0.15']),
    farhand('inventory', ['--format', 'csv', '--package', 'openssl']),
    farhand.json('inventory', ['--format', 'ansible']),
  ]);
  expect([wrong.code, wrong.err]).toEqual([1, expect.stringContaining('version_below needs it')]);
  expect(list.err).toBe('');
  expect(list.out).toMatch(/^=web-\{\{1\}\} +Debian +6\.1 .* 3\.0\.9 /m);
  const [heading = '', row] = csv.out.split('\r\n');
  expect(heading).toMatch(/^"machine_id","machine_name","ip",.*,"packages"$/);
  expect(row).toContain(`"${machine_id}","'=web-{{1}}","127.0.0.1","web",`);
  const host = '_web-__1__';
  expect(ansible.all.hosts[host]).toMatchObject({ ansible_host: '127.0.0.1', farhand_os: '__7*7__' });
  expect(ansible.all.children).toEqual({
    tag_web: { hosts: { [host]: {} } },
    os___7_7__: { hosts: { [host]: {} } },
  });
});

test('API keys are created with limits, listed, rotated and revoked; join tokens created, listed and revoked', async () => {
  const { system, agent, farhand } = await startScene();
  const flags = [
    '--name',
    'deploy',
    '--scopes',
    'commands:execute,machines:read',
    '--machine',
    'web-1',
    '--expires',
    '90d',
  ];
  const made = await farhand.json('auth create-key', flags);
  expect(made).toMatchObject({
    machine_ids: [agent.machineId],
    scopes: ['commands:execute', 'machines:read'],
  });
  expect(Date.parse(made.expires_at) - Date.now()).toBeGreaterThan(89 * 86_400_000);
  const tooLong = await farhand('auth rotate-key', [made.id, '--grace', '8d']);
  expect(tooLong.err).toContain('must be at most 604800000 milliseconds (7d)');
  const rotated = await farhand.json('auth rotate-key', [made.id]);
  expect([rotated.id, rotated.key === made.key]).toEqual([made.id, false]);
  const changed = await farhand.json('auth update-key', [made.id, '--name', 'deploy', '--tags', 'web']);
  expect(changed).toMatchObject({ machine_ids: [agent.machineId], tags: ['web'], scopes: made.scopes });
  expect((await farhand('auth update-key', [made.id, '--scopes', 'all'])).code).toBe(2);
  await system.client.keys.update({ key_id: made.id, tags: null });
  const list = await farhand('auth list-keys');
  expect(list.out).toMatch(
    new RegExp(`^deploy +${made.id} +commands:execute,machines:read +${agent.machineId}`, 'm'),
  );
  expect(list.out + list.err).not.toContain('service_apikey_');
  const login = await system.client.logins.create({ name: 'Firefox' });
  expect((await farhand('auth list-logins')).out).toMatch(
    new RegExp(`^Firefox +${login.id} +test +127.0.0.1`, 'm'),
  );
  expect(await farhand('auth end-login', [login.id])).toMatchObject({ code: 2 });
  expect(await farhand.json('auth end-login', [login.id, '--yes'])).toEqual({ deleted: true });
  expect((await farhand('auth list-logins')).out).not.toContain('Firefox');
  await farhand.json('auth revoke-key', [made.id, '--yes']);
  expect((await system.call('GET', '/auth/me', { key: rotated.key })).status).toBe(401);

  const token = await farhand.json('join-tokens create', [
    '--uses',
    '3',
    '--tags',
    'a, b',
    '--expires-in',
    '2h',
  ]);
  expect(token).toMatchObject({ uses: 3, tags: ['a', 'b'], token: expect.stringMatching(/^farhand_join_/) });
  expect((await farhand('join-tokens list')).out).toMatch(
    new RegExp(`^${token.id} +- +3 of 3 +a,b +in 1h 59m$`, 'm'),
  );
  const printed = await farhand('join-tokens create');
  expect(printed.out).toMatch(/^farhand_join_\S+\n$/);
  expect(printed.err).toMatch(/The token is valid for one machine until/);
  expect(await farhand.json('join-tokens revoke', [token.id, '--yes'])).toEqual({ deleted: true });
});

test('commands are listed, inspected, read and cancelled; batches inspected and cancelled', async () => {
  const { system, agent, farhand } = await startScene();
  const { client } = system;
  const done = await client.commands.create({
    machine_id: agent.machineId,
    command: 'printf "\\377out"; echo err >&2; exit 4',
  });
  const open = await client.commands.async({ machine_id: agent.machineId, command: 'sleep 300' });
  const batch = await client.batches.create({ tags: ['web'], command: 'sleep 300', wait: 0 });
  const [list, one, bytes, end, errors] = await Promise.all([
    farhand('commands list', ['--machine', 'web-1', '--status', 'failed']),
    farhand('commands get', [done.id]),
    farhand('commands output', [done.id]),
    farhand('commands output', [done.id, '--offset', '2']),
    farhand('commands output', [done.id, '--stream', 'stderr', '--follow']),
  ]);
  expect(list.out).toMatch(new RegExp(`^${done.id} +web-1 +failed +4 `, 'm'));
  expect(list.out.trim().split('\n')).toHaveLength(2);
  expect(one.out).toMatch(/^exit code +4$/m);
  expect(bytes.stdout).toEqual(Buffer.from([0xff, ...Buffer.from('out')]));
  expect([end.out, errors.out]).toEqual(['ut', 'err\n']);
  const [cancelled, ended, printed] = await Promise.all([
    farhand.json('commands cancel', [open.id]),
    farhand.json('batches cancel', [batch.id]),
    farhand('batches get', [batch.id]),
  ]);
  expect([cancelled.id, ended.id]).toEqual([open.id, batch.id]);
  expect(printed.out).toMatch(/^web-1 +cmd_/m);
  const all = await farhand('batches list', ['--machine', 'web-1', '--since', '1h']);
  expect(all.out).toMatch(new RegExp(`^${batch.id} +\\w+ +1 .* sleep 300$`, 'm'));
  const second = await system.agent({ name: 'db-10', tags: 'web' });
  const spoken = await client.batches.create({
    machine_ids: [agent.machineId, second.machineId],
    command: 'printf "1\\n2\\n\\033[2Jall"; seq 5000 >&2',
  });
  const { out } = await farhand('batches get', [spoken.id]);
  const ids = spoken.results.map(({ id }) => id);
  expect(out).toContain(
    [
      '\n\nweb-1 | 1',
      'web-1 | 2',
      'web-1 | all',
      `web-1 | [not all of stderr; for the rest: farhand commands output ${ids[0]} --stream stderr]\nweb-1 | `,
    ].join('\n'),
  );
  expect(out).toMatch(/^db-10 \| 2$/m);
  expect(out).toMatch(/^web-1 \| 5000$/m);
  const next = await client.commands.async({ machine_id: agent.machineId, command: 'exec sleep 300' });
  await expect
    .poll(() => farhand('commands signal', [next.id, '--signal', 'SIGINT']).then(({ code }) => code))
    .toBe(0);
  await expect
    .poll(() => client.commands.get({ command_id: next.id }))
    .toMatchObject({ status: 'failed', signal: 'SIGINT' });
});

/** Environment that makes `farhand` print the URL of each request to standard error. */
const printsRequests = {
  NODE_OPTIONS: `--import=data:text/javascript,${encodeURIComponent(
    'const send = fetch; globalThis.fetch = (url, init) => { process.stderr.write(url + "\\n"); return send(url, init); };',
  )}`,
};

test('farhand batches get requests the names of the machines once', async () => {
  const { system, farhand } = await startScene();
  const batch = await system.client.batches.create({ tags: ['web'], command: 'echo a; echo b' });
  const { out, err } = await farhand('batches get', [batch.id], { env: printsRequests });
  expect(out).toMatch(/\nweb-1 \| a\nweb-1 \| b\n$/);
  expect(err.match(/\/machines/g), err).toHaveLength(1);
});

test('schedules are created, changed, enabled, disabled, run, inspected and removed', async () => {
  const { system, farhand } = await startScene();
  const shape = ['--name', 'backup', '--machine', 'web-1', '--command', 'echo done'];
  const [unshaped, bad, twice, idle] = await Promise.all([
    farhand('schedules create', shape),
    farhand('schedules create', [...shape, '--cron', '99 * * * *']),
    farhand('schedules create', [...shape, '--cron', '@daily', '--tags', 'web']),
    farhand('schedules create', ['--name', 'idle', '--machine', 'web-1', '--cron', '@daily']),
  ]);
  expect([twice.code, twice.err]).toEqual([2, expect.stringContaining('give either --machine or --tags')]);
  expect([idle.code, idle.err]).toEqual([
    2,
    expect.stringContaining('give either --command or --saved-command'),
  ]);
  expect([unshaped.code, unshaped.err]).toEqual([
    2,
    expect.stringContaining('give either --cron or --on-change (when to run), but not both'),
  ]);
  expect([bad.code, bad.err]).toEqual([
    1,
    expect.stringMatching(/^farhand: .*cron: .*validation_failed.*\n$/),
  ]);
  const made = await farhand.json('schedules create', [
    ...[
      ...shape,
      '--cron',
      '30 2 * * *',
      '--timezone',
      'Europe/Berlin',
      '--timeout',
      '5m',
      '--notify-failure',
    ],
  ]);
  expect(made).toMatchObject({
    timezone: 'Europe/Berlin',
    timeout: 300_000,
    notify: { on_failure: true, on_success: false },
  });
  expect(
    (await farhand.json('schedules update', [made.id, '--cron', '@hourly', '--env', 'A=1'])).env,
  ).toEqual({ A: '1' });
  const both = await farhand.json('schedules update', [made.id, '--notify-success']);
  expect(both.notify).toEqual({ on_failure: true, on_success: true });
  const cleared = await farhand.json('schedules update', [made.id, '--clear', 'timeout,env,notify']);
  expect(cleared).toMatchObject({ timeout: null, env: null, notify: null, cron: '@hourly' });
  expect(await farhand('schedules update', [made.id, '--clear', 'cron'])).toMatchObject({ code: 2 });
  expect((await farhand.json('schedules disable', [made.id])).enabled).toBe(false);
  expect((await farhand.json('schedules enable', [made.id])).enabled).toBe(true);
  const { command_id } = await farhand.json('schedules run', [made.id]);
  for await (const { event } of system.client.commands.stream({ command_id })) if (event === 'exit') break;
  const [list, one, history, preview] = await Promise.all([
    farhand('schedules list', ['--machine', 'web-1']),
    farhand('schedules get', [made.id]),
    farhand.json('schedules history', [made.id]),
    farhand('schedules preview', ['0 9 * * mon', '--count', '2']),
  ]);
  const onChange = ['--on-change', '/etc/motd', '--recursive', '--settle', '5s'];
  const [on_change, without] = await Promise.all([
    farhand.json('schedules create', ['--name', 'x', '--machine', 'web-1', '--command', 'true', ...onChange]),
    farhand('schedules update', [made.id, '--settle', '5s']),
  ]);
  expect(on_change).toMatchObject({
    ...{ cron: null, on_change: { path: '/etc/motd', recursive: true, settle: 5000 } },
  });
  expect([without.code, without.err]).toEqual([2, expect.stringContaining('--on-change')]);
  expect((await farhand('schedules list')).out).toMatch(/ on change of \/etc\/motd /m);
  await farhand.json('schedules delete', [on_change.id, '--yes']);
  const onTags = ['--tags', 'nightly', '--command', 'true', '--cron', '@hourly'];
  const tagged = await farhand.json('schedules create', ['--name', 'tagged', ...onTags]);
  expect((await farhand('schedules upcoming')).out).toMatch(/ tagged +tags nightly$/m);
  await farhand.json('schedules delete', [tagged.id, '--yes']);
  const upcoming = await farhand('schedules upcoming', ['--within', '3h', '--limit', '2']);
  expect(upcoming.out).toMatch(/^\d{4}-\S+Z +backup +web-1$/m);
  expect(upcoming.out).toMatch(/^There are more runs; raise --limit/m);
  expect(list.out).toMatch(new RegExp(`^backup +${made.id} +web-1 +@hourly \\(Europe/Berlin\\) +yes`, 'm'));
  expect(one.out).toMatch(/^command +echo done$/m);
  expect(one.out).toMatch(/^machine +web-1$/m);
  expect(history).toEqual([expect.objectContaining({ command_id, trigger: 'manual' })]);
  expect(preview.out.trim().split('\n')).toEqual([
    expect.stringMatching(/Monday/),
    ...Array(2).fill(expect.stringMatching(/T09:00/)),
  ]);
  expect(await farhand.json('schedules delete', [made.id, '--yes'])).toEqual({ deleted: true });
});

test('a schedule is found by id, or by a unique name', async () => {
  const { system, agent, farhand } = await startScene();
  const other = await system.agent({ name: 'db-1' });
  expect((await farhand('schedules get', ['backup'])).err).toBe('farhand: no schedule is named backup\n');
  const shape = { command: 'true', cron: '@yearly' };
  const make = (name: string, machine_id: string) =>
    system.client.schedules.create({ ...shape, name, machine_id });
  const backup = await make('backup', agent.machineId);
  const twins = [
    await make('sched_twin', agent.machineId),
    await make('sched_twin', other.machineId),
  ] as const;
  const [one, updated, disabled, enabled, unknown, ambiguous] = [
    await farhand.json('schedules get', ['backup']),
    await farhand.json('schedules update', ['backup', '--cron', '@monthly']),
    await farhand('schedules disable', ['backup']),
    await farhand('schedules enable', [backup.id]),
    await farhand('schedules run', ['back']),
    await farhand('schedules delete', ['sched_twin', '--yes']),
  ];
  expect(one).toMatchObject({ id: backup.id, machine_id: agent.machineId });
  expect(updated).toMatchObject({ id: backup.id, cron: '@monthly' });
  for (const { out } of [disabled, enabled]) expect(out).toMatch(/^machine +web-1$/m);
  expect([disabled.out, enabled.out]).toEqual([
    expect.stringMatching(/^enabled +no$/m),
    expect.stringMatching(/^enabled +yes$/m),
  ]);
  expect([unknown.code, unknown.err]).toEqual([
    1,
    'farhand: no schedule is named back; names: backup, sched_twin, sched_twin\n',
  ]);
  expect([ambiguous.code, ambiguous.err]).toEqual([
    1,
    expect.stringMatching(/^farhand: several schedules are named sched_twin; use an id: /),
  ]);
  for (const [{ id }, name] of [
    [twins[0], 'web-1'],
    [twins[1], 'db-1'],
  ] as const)
    expect(ambiguous.err).toContain(`${id} (on ${name})`);
  const { command_id } = await farhand.json('schedules run', ['backup']);
  expect(await farhand.json('schedules history', ['backup'])).toEqual([
    expect.objectContaining({ command_id, schedule_id: backup.id }),
  ]);
  // A key without the scope schedules:read cannot look up a schedule by its name, but can remove it by its id.
  const { key } = await system.keyed(['schedules:write', 'commands:execute']);
  const [blind, byName] = [
    await farhand('schedules delete', [twins[0].id, '--yes'], { env: { FARHAND_API_KEY: key } }),
    await farhand('schedules delete', ['backup', '--yes']),
  ];
  expect(blind.out).toBe(`removed  ${twins[0].id}\n`);
  expect(byName.out).toBe(`removed  backup (${backup.id})\n`);
  const { items } = await system.client.schedules.list();
  expect(items.map(({ id }) => id)).toEqual([twins[1].id]);
  for (let number = 0; number < 11; number++) await make(`a-${number}`, other.machineId);
  const many = await farhand('schedules get', ['backup']);
  expect(many.err).toMatch(/names: (a-\d+, ){9}a-\d+…\n$/);
});

test('webhooks are created, changed, tested, inspected and removed; the secret is read from standard input', async () => {
  const system = await startFarhand({ flags: ['--webhook-allow', '127.0.0.0/8'] });
  const farhand = createLine(system);
  let status = 200;
  const receiver = await startReceiver((response) => void response.writeHead(status).end());
  const made = await farhand.json(
    'webhooks create',
    [receiver.url, '--events', 'machine.*', '--secret-stdin'],
    { input: 'of us both\n' },
  );
  expect(made).toMatchObject({ url: receiver.url, events: ['machine.*'], enabled: true });
  expect((await farhand('webhooks test', [made.id])).out).toMatch(/^delivered +yes$/m);
  expect(receiver.got[0]?.headers['x-service-signature']).toMatch(/^sha256=/);
  status = 500;
  expect((await farhand('webhooks test', [made.id])).code).toBe(1);
  status = 200;
  expect((await farhand.json('webhooks update', [made.id, '--disable'])).enabled).toBe(false);
  expect(
    (await farhand.json('webhooks update', [made.id, '--enable', '--events', 'machine.registered'])).enabled,
  ).toBe(true);
  await system.agent({ name: 'web-1' });
  await receiver.heard(3);
  const [list, one, deliveries] = await Promise.all([
    farhand('webhooks list'),
    farhand('webhooks get', [made.id]),
    farhand.json('webhooks deliveries', [made.id]),
  ]);
  expect(list.out).toContain(made.id);
  expect(one.out).toMatch(/^events +machine.registered$/m);
  expect(deliveries).toEqual([expect.objectContaining({ type: 'machine.registered' })]);
  expect((await farhand.json('webhooks redeliver', [made.id, deliveries[0].id])).id).toBe(deliveries[0].id);
  await receiver.heard(4);
  expect(await farhand.json('webhooks delete', [made.id, '--yes'])).toEqual({ deleted: true });
});

test('alerts are listed and acknowledged; rules and channels are created, changed, tested and removed', async () => {
  const system = await startFarhand({ flags: ['--webhook-allow', '127.0.0.0/8'] });
  const farhand = createLine(system);
  let status = 200;
  const receiver = await startReceiver((response) => response.writeHead(status).end());
  const { machineId } = await system.agent({ name: 'web-1' });
  const channel = await farhand.json('alert-channels create', ['ops', '--type', 'slack', '--url-stdin'], {
    input: `${receiver.url}\n`,
  });
  const mail = [
    'ops',
    '--type',
    'email',
    '--url',
    'smtp://127.0.0.1:1',
    '--from',
    'a@b.test',
    '--to',
    'c@b.test',
  ];
  const twin = await farhand('alert-channels create', mail);
  expect([twin.code, twin.err]).toEqual([
    0,
    expect.stringMatching(/^farhand: several alert channels are named ops; use an id: chan_\w+, chan_\w+\n$/),
  ]);
  const [, twinId = ''] = /^id +(chan_\w+)$/m.exec(twin.out) ?? [];
  expect((await farhand('alert-channels delete', [twinId, '--yes'])).code).toBe(0);
  expect(channel).toMatchObject({ name: 'ops', type: 'slack', url: `http://127.0.0.1:${receiver.port}/…` });
  expect((await farhand('alert-channels test', ['ops'])).out).toMatch(/^delivered +yes$/m);
  status = 500;
  expect((await farhand('alert-channels test', [channel.id])).code).toBe(1);
  expect((await farhand.json('alert-channels update', [channel.id, '--disable'])).enabled).toBe(false);
  const rule = await farhand.json('alert-rules create', [
    ...['memory', '--kind', 'memory', '--above', '0.1', '--for', '0s', '--machine', 'web-1'],
  ]);
  expect(rule).toMatchObject({ kind: 'memory', above: 0.1, for: 0, machine_ids: [machineId] });
  const more = ['--kind', 'offline', '--for', '5m', '--channel-ids', 'ops'];
  const away = await farhand.json('alert-rules create', ['away', ...more]);
  expect(away.channel_ids).toEqual([channel.id]);
  expect((await farhand('alert-rules get', ['away'])).out).toMatch(/^for +5m$/m);
  expect((await farhand('alert-rules get', ['memory'])).out).toMatch(/^machine ids +web-1$/m);
  expect((await farhand('alert-rules list', [])).out).toMatch(/^memory .* web-1 /m);
  for (const [verb, name] of [
    ['alert-channels update', 'ops'],
    ['alert-rules update', 'away'],
    ['webhooks update', 'hook_x'],
  ] as const)
    expect(await farhand(verb, [name, '--enable', '--disable'])).toMatchObject({
      code: 2,
      err: expect.stringContaining('use --enable or --disable, but not both'),
    });
  expect((await farhand('alert-rules delete', ['gone', '--yes'])).err).toMatch(
    /no alert rule is named gone; names: away, memory/,
  );
  expect(await farhand.json('alert-rules delete', ['away', '--yes'])).toEqual({ deleted: true });
  const open = async () => await farhand.json('alerts list', ['--status', 'open', '--rule', rule.id]);
  await expect.poll(async () => (await open()).length).toBe(1);
  const [{ id }] = await open();
  expect((await farhand('alerts list', ['--machine', 'web-1'])).out).toContain('memory usage of web-1');
  expect((await farhand.json('alerts acknowledge', [id, '--note', 'on it'])).status).toBe('acknowledged');
  expect((await farhand('alerts get', [id])).out).toMatch(/^note +on it$/m);
  expect((await farhand.json('alert-rules update', [rule.id, '--above', '99', '--disable'])).enabled).toBe(
    false,
  );
  expect((await farhand('alert-rules list')).out).toContain(rule.id);
  expect((await farhand('alert-rules get', [rule.id])).out).toMatch(/^recover +89.1$/m);
  expect((await farhand('alert-channels list')).out).toContain(channel.id);
  expect((await farhand('alert-channels get', [channel.id])).out).toMatch(/^type +slack$/m);
  expect(await farhand.json('alert-channels deliveries', [channel.id])).toEqual([]);
  expect((await farhand('alert-channels redeliver', [channel.id, 'dlv_x'])).code).toBe(1);
  expect(await farhand.json('alert-channels delete', [channel.id, '--yes'])).toEqual({ deleted: true });
  expect(await farhand.json('alert-rules delete', [rule.id, '--yes'])).toEqual({ deleted: true });
  const window = await farhand.json('maintenance-windows create', [
    ...['reboot', '--machine', 'web-1', '--duration', '30m'],
  ]);
  expect(window).toMatchObject({ machine_ids: [machineId], cron: null });
  expect((await farhand('maintenance-windows list')).out).toContain(window.id);
  expect((await farhand('maintenance-windows get', [window.id])).out).toMatch(/^name +reboot$/m);
  expect(await farhand.json('maintenance-windows delete', ['reboot', '--yes'])).toEqual({ deleted: true });
});

test('events are listed, and followed as lines until Ctrl-C; the audit lists who did what', async () => {
  const { system, farhand } = await startScene();
  const list = await farhand('events', [
    '--machine',
    'web-1',
    '--type',
    'machine.registered',
    '--since',
    '1h',
  ]);
  expect(list.out).toMatch(/ago +machine.registered +web-1/);
  const following = farhand.start('events', ['--follow', '--type', 'machine.*', '-o', 'json']);
  // The test cannot know when `farhand events --follow` has connected. So a machine joins every second until an event
  // is printed.
  const heard = following.says(/"type":"machine.registered".*"machine_name":"web-2"/);
  let names = 2;
  const more = setInterval(() => void system.agent({ name: `web-${names++}` }), 1000);
  await following.says(/machine_name/).finally(() => clearInterval(more));
  following.child.kill('SIGINT');
  const { code, out } = await following.ended;
  expect(code).toBe(0);
  for (const line of out.trim().split('\n')) expect(JSON.parse(line)).toHaveProperty('type');
  heard.catch(() => {});
  const rows = await farhand.json('audit', ['--limit', '5']);
  expect(rows[0]).toHaveProperty('action');
  expect((await farhand('audit')).out).toMatch(/^WHEN +KEY +ACTION/);
  const { id, name } = await system.client.keys.me();
  const [byId, byName, ofNone] = await Promise.all(
    [id, name, 'none'].map((key) => farhand.json('audit', ['--key', key, '--limit', '1'])),
  );
  for (const [entry] of [byId, byName]) expect(entry).toMatchObject({ key_id: id, key_name: name });
  expect(ofNone).toEqual([]);
});

test('farhand lists the history of a removed machine by its id, before and after a restart of the broker', async () => {
  const system = await startFarhand();
  const { machineId: machine, ended } = await system.agent();
  await system.client.commands.create({ machine_id: machine, command: 'true' });
  await system.client.machines.remove({ machine_id: machine });
  // The agent stops for good. `ended` rejects with the reason, which does not matter here.
  await ended.catch(() => undefined);
  const verbs = ['commands list', 'events', 'audit'];
  const look = async (at: Pick<TestSystem, 'url' | 'key'>) => {
    const farhand = createLine(at);
    const printed = await Promise.all(
      verbs.map((verb) => farhand(verb, ['--machine', machine, '-o', 'json'])),
    );
    expect(printed.map(({ code, err }) => [code, err])).toEqual(verbs.map(() => [0, '']));
    return printed.map(({ out }) => JSON.parse(out).length > 0);
  };
  expect(await look(system)).toEqual([true, true, true]);
  await system.broker.close();
  expect(await look(await startFarhand({ dataDir: system.dataDir }))).toEqual([true, true, true]);
});

// ---- All verbs

function leaves(command: Command, path: string[] = []): { words: string; command: Command }[] {
  const below = command.commands.filter((one) => one.name() !== 'help');
  if (below.length === 0) return [{ words: path.join(' '), command }];
  return below.flatMap((one) => leaves(one, [...path, one.name()]));
}

function helpOf(command: Command): string {
  let text = '';
  const writeOut = (more: string): void => {
    text += more;
  };
  command.configureOutput({ writeOut }).outputHelp();
  return text;
}

test('the help of a verb that changes an object names no defaults, because a missing flag changes nothing', async () => {
  const changes = leaves(await createProgram()).filter(({ words }) => words.endsWith(' update'));
  expect(changes.length).toBeGreaterThan(4);
  for (const { words, command } of changes) {
    const texts = command.options.filter(({ long }) => long !== '--output').map((one) => one.description);
    expect([words, texts.filter((text) => text.includes('default'))]).toEqual([words, []]);
  }
});

test('every verb has a description, examples in its help, and a test', async () => {
  const all = leaves(await createProgram());
  const sources = [...readdirSync(import.meta.dirname), '../faults/backup.test.ts']
    .map((name) => readFileSync(join(import.meta.dirname, name), 'utf8'))
    .join('\n');
  const isTested = (words: string): boolean =>
    new RegExp(`(farhand|line|local)(\\.\\w+)?\\(\\s*'${words}'`).test(sources) ||
    sources.includes(
      `${words
        .split(' ')
        .map((word) => `'${word}'`)
        .join(', ')}`,
    );
  expect(all.length).toBeGreaterThan(50);
  expect(all.filter(({ words }) => !isTested(words)).map(({ words }) => words)).toEqual([]);
  expect(all.filter(({ command }) => command.description() === '').map(({ words }) => words)).toEqual([]);
  const bare = all.filter(
    ({ words, command }) =>
      !helpOf(command).includes(`Examples:\n  `) || !helpOf(command).includes(`farhand ${words}`),
  );
  expect(bare.map(({ words }) => words)).toEqual([]);
});
