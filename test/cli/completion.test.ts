// farhand completion in real shells: candidates are verbs and flags, and values from the broker.
import { execFile } from 'node:child_process';
import { chmodSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { loadPtyMaker } from '../../agent/processes/terminals/pty.ts';
import { createLine, severalProgramsMs } from '../cli-fixture.ts';
import { lacks, needs } from '../skip-without-programs.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

/** Asynchronous, because the broker runs in this process and must answer meanwhile. */
const run = promisify(execFile);

/** Saves the command `restart`, whose parameters have a list of values, two values, and any value. */
const saveRestart = ({ client }: TestSystem) =>
  client.savedCommands.create({
    name: 'restart',
    argv: ['true', '{{unit}}', '{{force}}', '{{count}}'],
    parameters: [
      { name: 'unit', type: 'enum', values: ['nginx', 'redis'] },
      { name: 'force', type: 'boolean' },
      { name: 'count', type: 'integer', min: 1, max: 9 },
    ],
  });

/** A user with `farhand` in PATH, two machines, and a folder on them. */
async function startScene() {
  const system = await startFarhand();
  await system.agent({ name: 'web-1', tags: 'web,two words' });
  const agent = await system.agent({ name: 'db 1' });
  const farhand = createLine(system);
  const { file, env } = farhand.program;
  const bin = temporaryFolder('bin');
  writeFileSync(join(bin, 'farhand'), `#!/bin/sh\nexec ${process.execPath} ${file} "$@"\n`);
  chmodSync(join(bin, 'farhand'), 0o755);
  const there = temporaryFolder('there');
  mkdirSync(join(there, 'site'));
  writeFileSync(join(there, 'some file'), '');
  writeFileSync(join(there, 'evil\u001b[2J'), '');
  writeFileSync(Buffer.from(`${there}/e\xff`, 'latin1'), '');
  return { system, agent, farhand, there, env: { ...env, PATH: `${bin}:${env.PATH}`, TERM: 'dumb' } };
}

needs('bash')(
  'bash gets verbs, flags, choices, machines and remote paths; a broker that is away gives none',
  async () => {
    const { system, env, there } = await startScene();
    const { client } = system;
    const to = { type: 'webhook', url: 'https://example.org/' } as const;
    await client.alertChannels.create({ name: 'ops', ...to });
    await client.alertChannels.create({ name: 'on call', ...to });
    await client.alertRules.create({ name: 'disk-full', kind: 'disk', above: 90 });
    await client.maintenanceWindows.create({ name: 'nightly', cron: '0 3 * * *', duration: 3_600_000 });
    await saveRestart(system);
    writeFileSync(join(there, 'x=yz'), '');
    writeFileSync(join(there, "it's $1"), '');
    mkdirSync(join(there, 'odd'));
    for (const name of ['!ls', '~ls']) writeFileSync(join(there, 'odd', name), '');
    const hook = await client.webhooks.create({ url: 'https://example.org/', events: ['*'] });
    const complete = async (line: string, more: Record<string, string> = {}): Promise<string[]> => {
      const script = `eval "$(farhand completion bash)"; COMP_LINE=$1; COMP_POINT=\${#COMP_LINE}
      _farhand farhand 2>/dev/null; printf '%s\\n' "\${COMPREPLY[@]}"`;
      const args = ['--norc', '-c', script, 'bash', line];
      const { stdout, stderr } = await run('bash', args, { env: { ...env, ...more } });
      expect(stderr).toBe('');
      return stdout.split('\n').filter(Boolean);
    };
    const nowhere = { FARHAND_URL: 'http://127.0.0.1:2' };
    const cases: [line: string, found: string[], env?: Record<string, string>][] = [
      ['farhand mach', ['machines']],
      ['farhand machines re', ['rename', 'remove']],
      ['farhand exec --t', ['--tags', '--timeout']],
      ['farhand machines list --status ', ['online', 'offline']],
      ['farhand machines tag r', ['remove']],
      ['farhand exec ', ['db\\ 1', 'web-1']],
      ['farhand exec web-1 -- up', []],
      ['farhand commands list --machine w', ['web-1']],
      ['farhand alert-rules update d', ['disk-full']],
      ['farhand alerts list --rule ', ['disk-full']],
      ['farhand alert-channels test ', ['on\\ call', 'ops']],
      ['farhand alert-rules update disk-full --channel-ids ops,o', ['ops,on\\ call', 'ops,ops']],
      ['farhand alert-rules update disk-full --machine web-1,d', ['web-1,db\\ 1']],
      ['farhand maintenance-windows delete n', ['nightly']],
      ['farhand saved-commands run r', ['restart']],
      ['farhand schedules create --saved-command r', ['restart']],
      ['farhand webhooks test h', [hook.id]],
      ['farhand files ls we', ['web-1:']],
      ['farhand files put ', []],
      // After a colon Bash completes only the rest of the word.
      [`farhand files ls web-1:${there}/s`, [`${there}/site/`, `${there}/some\\ file`]],
      [`farhand files ls web-1:${there}/e`, []],
      // Zf8= is the name in base64 that the broker answers, not a name on the machine.
      [`farhand files ls web-1:${there}/Z`, []],
      [`farhand files ls web-1:${there}/x=y`, ['yz']],
      [`farhand files get "db 1":${there}/si`, [`${there}/site/`]],
      // bash replaces all that follows an open quote.
      [`farhand files get "db 1:${there}/so`, [`db 1:${there}/some file`]],
      [`farhand files get "web-1:${there}/it's`, [`web-1:${there}/it's \\$1`]],
      ['farhand exec "db ', ['db 1']],
      // bash must neither insert an earlier command for `!` nor a home directory for `~`.
      [`farhand files get "web-1:${there}/odd/!`, [`web-1:${there}/odd/"'!'"ls`]],
      [`farhand files get web-1:${there}/odd/`, [`${there}/odd/\\!ls`, `${there}/odd/\\~ls`]],
      [`farhand files get 'web-1:${there}/it`, [`web-1:${there}/it'\\''s $1`]],
      ['farhand exec --tags ', ['two\\ words', 'web']],
      ['farhand exec --tags web,t', ['web,two\\ words']],
      ['farhand machines tag add web-1 eu,w', ['eu,web']],
      ['farhand auth create-key --scopes machines:r', ['read']],
      ['farhand auth update-key key_1 --scopes machines:read,files:r', ['read']],
      ['farhand saved-commands run restart --param ', ['unit=', 'force=', 'count=']],
      ['farhand saved-commands run restart --param unit=', ['nginx', 'redis']],
      ['farhand saved-commands run restart --param force=t', ['true']],
      ['farhand saved-commands run restart --param count=', []],
      ['farhand schedules create --saved-command restart --param unit=r', ['redis']],
      ['farhand schedules create --param ', []],
      ['farhand alert-channels create --to w', []],
      ['farhand exec ', [], nowhere],
      ['farhand exec ', [], { FARHAND_API_KEY: 'wrong' }],
      ['farhand nonsense ', []],
    ];
    // Tries again, because on a busy machine the broker may need longer than the one second that completion waits.
    const check = ([line, found, more]: (typeof cases)[number]) =>
      waitFor(async () => expect([line, await complete(line, more)]).toEqual([line, found]));
    for (let at = 0; at < cases.length; at += 3) await Promise.all(cases.slice(at, at + 3).map(check));
  },
  severalProgramsMs,
);

test.skipIf(lacks('bash') || !loadPtyMaker())(
  'TAB in an interactive bash completes a machine (needs bash, the pty library)',
  async () => {
    const { system, agent, env } = await startScene();
    const { client } = system;
    const args = ['--norc', '--noprofile', '-i'];
    const shell = { machine_id: agent.machineId, shell: 'bash', args, env };
    const { session_id } = await client.sessions.create(shell);
    const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
    let seen = '';
    const reading = (async () => {
      for await (const bytes of terminal.output) seen += Buffer.from(bytes).toString();
    })();
    await terminal.write('eval "$(farhand completion bash)"; echo rea""dy\n');
    await waitFor(() => expect(seen).toMatch(/^ready/m));
    await terminal.write('farhand machines get we\t');
    await waitFor(() => expect(seen).toContain('machines get web-1 '));
    await client.sessions.end({ session_id });
    await reading;
  },
);

/** Lines whose last word has one candidate, for shells that replace this whole word themselves. */
const single = (there: string): [words: string[], found: string][] => [
  [['exec', 'we'], 'web-1'],
  [['files', 'ls', `"db 1:${there}/so`], `db 1:${there}/some file`],
  [['exec', '--tags', 'web,t'], 'web,two words'],
  [['auth', 'create-key', '--scopes', 'machines:read,files:r'], 'machines:read,files:read'],
  [['saved-commands', 'run', 'restart', '--param', 'u'], 'unit='],
  [['saved-commands', 'run', 'restart', '--param', 'unit=n'], 'unit=nginx'],
];

needs('zsh')('zsh loads its script and gets candidates', async () => {
  const { system, env, there } = await startScene();
  await saveRestart(system);
  const script = `autoload -U compinit; compinit -u -D; eval "$(farhand completion zsh)"
    compadd() { print -rl -- "\${@:#-*}"; }; words=(farhand "$@"); CURRENT=$#words; _farhand`;
  for (const [words, found] of single(there)) {
    const { stdout } = await run('zsh', ['-f', '-c', script, 'zsh', ...words], { env });
    expect(stdout.trim()).toBe(found);
  }
});

needs('fish')('fish loads its script and gets candidates', async () => {
  const { system, env, there } = await startScene();
  await saveRestart(system);
  const script = 'farhand completion fish | source; complete -C "farhand $argv"';
  for (const [words, found] of single(there)) {
    const { stdout } = await run('fish', ['--no-config', '-c', script, ...words], { env });
    expect(stdout.trim()).toBe(found);
  }
});

test('farhand completion knows three shells', async () => {
  const farhand = createLine();
  const { code, err } = await farhand('completion', ['tcsh']);
  expect([code, err]).toEqual([2, expect.stringContaining('Allowed choices are bash, zsh, fish')]);
});
