// The page docs/postgresql.md: its commands succeed with a real server and a real broker. Scripts replace sudo and
// systemctl.
import { execFile } from 'node:child_process';
import { chmodSync, existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { programs } from '../start-postgres.ts';
import { createServer, withPostgres } from './postgres-fixture.ts';

const root = join(import.meta.dirname, '../..');
const page = readFileSync(join(root, 'docs/postgresql.md'), 'utf8');

const blocksOf = (text: string, fence: string): string[] =>
  [...text.matchAll(/^```(.*)\n([\s\S]*?)^```$/gm)]
    .filter(([, one]) => one === fence)
    .map(([, , code = '']) => code);

/** Returns the shell blocks below a heading. */
function commands(heading: string): string[] {
  const [, after = ''] = page.split(`\n${heading}\n`);
  return blocksOf(after.split(/^##/m)[0] ?? '', 'sh');
}

const main = (file: string): string => `exec '${process.execPath}' '${join(root, file)}' "$@"`;

/**
 * Scripts that replace programs of the machine, by name. `sudo -e`, which edits the settings, adds or removes the
 * settings of the database.
 */
const scripts = {
  sudo: `while :; do case "$1" in
    -u) shift 2 ;;
    -e) if grep -q database_url "$2"; then sed -i /database_/d "$2"; else cat database.toml >> "$2"; fi; exit ;;
    *) exec "$@" ;;
  esac; done`,
  systemctl: `case "$1" in
    stop) kill "$(cat pid)"; while kill -0 "$(cat pid)" 2>/dev/null; do sleep 0.05; done ;;
    start) rm -f log; touch log; farhand-broker > log 2>&1 & echo $! > pid
      until grep -q 'broker is up' log; do kill -0 "$(cat pid)" || { cat log >&2; exit 1; }; sleep 0.05; done ;;
  esac`,
  farhand: main('broker/cli/main.ts'),
  'farhand-broker': main('broker/main.ts'),
};

/** A machine whose broker stores its data in files. The broker's service is stopped. */
async function createBox() {
  const server = await createServer();
  const folder = temporaryFolder('box');
  const [bin, etc, dataDir, backups] = ['bin', 'etc', 'data', 'backups'].map((name) =>
    join(folder, name),
  ) as [string, string, string, string];
  for (const path of [bin, etc, dataDir, backups]) mkdirSync(path, { mode: 0o700 });
  for (const [name, script] of Object.entries(scripts)) {
    writeFileSync(join(bin, name), `#!/bin/sh\n${script}\n`);
    chmodSync(join(bin, name), 0o755);
  }
  // Adapts a text of the page to this test. The owner of the database has another name, because `farhand` is the
  // superuser of this server.
  const here = (text: string): string =>
    text
      .replaceAll('/etc/farhand', etc)
      .replaceAll('/var/lib/farhand-broker', dataDir)
      .replaceAll('/backups', backups)
      .replaceAll('postgres://farhand@db.example.org', `postgres://owner@127.0.0.1:${server.port}`)
      .replaceAll('--owner farhand', '--owner owner')
      .replaceAll('--pwprompt farhand', '--pwprompt owner')
      .replaceAll('-g farhand-broker ', '');
  const settings = join(etc, 'broker.toml');
  writeFileSync(settings, `data_dir = "${dataDir}"\nhttp = "127.0.0.1:0"\ngrpc = "127.0.0.1:0"\n`);
  writeFileSync(join(folder, 'database.toml'), here(blocksOf(page, 'toml')[0] ?? ''));
  writeFileSync(join(folder, 'password.txt'), 'right-word\n');
  const env = {
    ...{ PATH: `${bin}:${programs()}:${process.env.PATH}`, HOME: folder, FARHAND_CONFIG: settings },
    ...{ PGHOST: server.folder, PGPORT: String(server.port), PGUSER: 'farhand', PGPASSWORD: 'right-word' },
  };
  onTestFinished(() => {
    const pid = existsSync(join(folder, 'pid')) ? Number(readFileSync(join(folder, 'pid'), 'utf8')) : 0;
    if (pid > 0 && existsSync(`/proc/${pid}`)) process.kill(pid, 'SIGKILL');
  });
  return {
    dataDir,
    settings,
    /** Runs shell commands of the page, with `input` as if it were typed. Returns what they print. */
    async run(code: string | undefined, input = ''): Promise<string> {
      const script = here(code ?? 'exit 1');
      const running = promisify(execFile)('setsid', ['--wait', 'sh', '-ec', script], { cwd: folder, env });
      // A script that ends without reading its input is no failure.
      running.child.stdin?.on('error', () => {}).end(input);
      const { stdout } = await running.catch((error: Error & { stderr: string }) =>
        expect.fail(`${code}\n${error.message}\n${error.stderr}`),
      );
      return stdout;
    },
    names: () =>
      withBroker({ dataDir, url: undefined, apiKey: undefined }, async (client) =>
        (await client.keys.list()).items.map(({ name }) => name).sort(),
      ),
    create: (name: string) =>
      withBroker({ dataDir, url: undefined, apiKey: undefined }, (client) =>
        client.keys.create({ name, scopes: ['machines:read'] }),
      ),
  };
}

withPostgres('docs/postgresql.md', () => {
  test('its commands start, move, check, back up and restore a broker', { timeout: 120_000 }, async () => {
    const { dataDir, settings, run, names, create } = await createBox();
    // The installation is left out, because this box has a broker already.
    const [database, , password, doctor, ...others] = commands('## Start');
    expect(others).toEqual([]);
    await run('systemctl start farhand-broker');
    await create('one');
    await run(database, 'right-word\nright-word\n');
    await run(password);

    const [move, back] = commands('## Move a broker to PostgreSQL');
    expect(await run(move)).toMatch(/^Copied \d+ documents and \d+ rows to postgres:/m);
    expect(existsSync(join(dataDir, 'state.json'))).toBe(false);
    expect(await names()).toEqual(['one']);
    expect(await run(doctor)).toMatch(/^ok +used by +farhand-broker/m);

    await create('two');
    for (const code of commands('## Backup')) await run(code);
    await create('three');
    for (const code of commands('### Restore')) await run(code);
    expect(await names()).toEqual(['one', 'two']);

    await run(back);
    expect(existsSync(join(dataDir, 'state.json'))).toBe(true);
    expect(readFileSync(settings, 'utf8')).not.toContain('database');
    expect(await names()).toEqual(['one', 'two']);
  });
});
