// Commands as another user: settings from the caller, such as LD_PRELOAD, take effect only after root's rights are
// dropped.
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { plan } from '../../agent/processes/launch-plan.ts';
import { has } from '../skip-without-programs.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

const asRoot = process.getuid?.() === 0;
const user = 'daemon';

/** Makes a folder with write access for every user. */
function createFolder(): string {
  const folder = temporaryFolder('everybody');
  chmodSync(folder, 0o777);
  return folder;
}

/** Runs commands as another user on a real agent that runs as root. */
async function machine() {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const uid = execFileSync('id', ['-u', user], { encoding: 'utf8' }).trim();
  return {
    uid,
    run: (command: string, more: { args?: string[]; env?: Record<string, string>; cwd?: string } = {}) =>
      system.client.commands.create({ machine_id, command, user, ...more }),
  };
}

test.runIf(asRoot)(
  'a directory that the user has no right to enter is refused, also behind a link of the user',
  async () => {
    const { run } = await machine();
    const secret = temporaryFolder('secret');
    mkdirSync(join(secret, 'inner'));
    writeFileSync(join(secret, 'inner', 'file'), 'secret');
    const link = join(createFolder(), 'link');
    symlinkSync(join(secret, 'inner'), link);
    for (const cwd of [join(secret, 'inner'), link]) {
      const { exit_code, stdout, stderr } = await run('cat file', { cwd });
      expect([exit_code, stdout, stderr]).toEqual([126, '', expect.stringContaining(cwd)]);
    }
    expect(await run('true', { cwd: join(secret, 'nowhere') })).toMatchObject({
      status: 'failed',
      reason: expect.stringContaining('does not exist'),
    });
  },
);

test.runIf(asRoot && has('gcc'))(
  'a library in LD_PRELOAD is loaded by no process of root (needs gcc)',
  async () => {
    const { run, uid } = await machine();
    const folder = createFolder();
    const [source, library, out] = ['spy.c', 'spy.so', 'out'].map((name) => join(folder, name));
    writeFileSync(
      source!,
      `#include <stdio.h>
    #include <unistd.h>
    __attribute__((constructor)) static void spy(void) {
      FILE *out = fopen("${out}", "a");
      if (out) { fprintf(out, "%d\\n", geteuid()); fclose(out); }
    }`,
    );
    execFileSync('gcc', ['-shared', '-fPIC', '-o', library!, source!]);
    // Created in advance and writable for all, so that both root and the user could append.
    writeFileSync(out!, '');
    chmodSync(out!, 0o666);
    for (const args of [undefined, ['-c', 'true']]) {
      const env = { LD_PRELOAD: library! };
      const { exit_code } = await run(args ? '/bin/sh' : 'true', { env, ...(args && { args }) });
      expect(exit_code).toBe(0);
    }
    const seen = readFileSync(out!, 'utf8').trim().split('\n');
    expect(new Set(seen)).toEqual(new Set([uid]));
  },
);

test.runIf(asRoot)('the dynamic loader gets LD_ variables only as the other user', async (context) => {
  const { run, uid } = await machine();
  const folder = createFolder();
  const env = { LD_DEBUG: 'libs', LD_DEBUG_OUTPUT: join(folder, 'trace') };
  await run('/bin/true', { args: [], env });
  const owners = readdirSync(folder).map((name) => String(statSync(join(folder, name)).uid));
  if (owners.length === 0) context.skip('needs glibc');
  expect(new Set(owners)).toEqual(new Set([uid]));
});

test.runIf(asRoot)(
  'the process that still runs as root gets only the id of the command, and no values in its arguments',
  async () => {
    const spec = { direct: true, command: '/bin/true', args: ['argument'], cwd: '/tmp', user, timeout_ms: 0 };
    const env = {
      LD_PRELOAD: '/secret.so',
      TOKEN: 'secret',
      PATH: '/secret',
      ENV: '/secret',
      BASH_ENV: '/secret',
    };
    const given = await plan('cmd_1', { ...spec, stdin: Buffer.alloc(0), input: false, env }, true);
    expect([given.cwd, given.args.join(' ')]).toEqual(['/', expect.not.stringContaining('secret')]);
    const names = Object.keys(given.env).filter((name) => !/^FARHAND_ENV_\d+$/.test(name));
    expect(names).toEqual(['FARHAND_COMMAND_ID']);
  },
);

test.runIf(asRoot)('the environment has exactly the requested variables', async () => {
  const { run } = await machine();
  const odd = `it's "$HOME" \`id\` \\ a=b\n* line\n`;
  const env = {
    ODD: odd,
    EMPTY: '',
    PATH: '/usr/bin:/bin',
    IFS: 'x',
    LD_LIBRARY_PATH: '/opt/lib',
    PWD: '/pwd',
  };
  const { stdout } = await run('/usr/bin/env', { args: ['-0'], env, cwd: '/tmp' });
  const seen = Object.fromEntries(
    stdout
      .split('\0')
      .flatMap((line) => (line ? [[line.split('=')[0], line.slice(line.indexOf('=') + 1)]] : [])),
  );
  const own = ['FARHAND_COMMAND_ID', 'HOME', 'LANG', 'LOGNAME', 'SHELL', 'SHLVL', 'USER', '_'];
  expect(seen).toMatchObject(env);
  expect(Object.keys(seen).filter((name) => !own.includes(name) && !(name in env))).toEqual([]);
  expect(await run('pwd -P; echo "$USER"', { cwd: '/tmp' })).toMatchObject({ stdout: `/tmp\n${user}\n` });
});
