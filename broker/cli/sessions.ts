// farhand sessions: terminals that are open.
import { type Command, Option } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { type Where, withBroker } from './connect.ts';
import { type Format, print } from './output.ts';
import { show } from './shell.ts';

interface Options {
  dataDir?: string;
}

export function addSessions(program: Command, where: (options: Options) => Where): void {
  const sessions = program.command('sessions').description('terminals on machines');
  const dataDir = (command: Command): Command =>
    command.option('--data-dir <dir>', 'the broker’s data directory, on its own box');
  dataDir(sessions.command('list'))
    .description('sessions that have not ended, the latest first')
    .option('--all', 'the latest hundred, ended ones too')
    .addOption(new Option('-o, --output <format>').choices(['text', 'json']).default('text'))
    .action(async (options: Options & { all?: boolean; output: Format }) => {
      const shown = await withBroker(where(options), (client) => sessionsOf(client, options.all ?? false));
      print(options.output, shown, () =>
        shown.map((one) =>
          [
            one.session_id,
            one.status,
            one.machine_hostname,
            `${one.attached_count} attached`,
            one.created_at,
          ].join('  '),
        ),
      );
    });
  dataDir(sessions.command('attach'))
    .description('show a session here; Ctrl-] detaches')
    .argument('<session>', 'its id')
    .option('--observe', 'only look')
    .action(async (session: string, options: Options & { observe?: boolean }) => {
      await withBroker(where(options), async (client) => {
        process.exitCode = await show(client, session, options.observe ?? false);
      });
    });
  dataDir(sessions.command('end'))
    .description('end a session and everything that runs in it')
    .argument('<session>', 'its id')
    .addOption(new Option('-o, --output <format>').choices(['text', 'json']).default('text'))
    .action(async (session_id: string, options: Options & { output: Format }) => {
      const ended = await withBroker(where(options), (client) => client.sessions.end({ session_id }));
      print(options.output, ended, () => [`${ended.session_id} ${ended.status}`]);
    });
}

const openStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD'] as const;

/** At most a hundred of each status that is asked for, the latest first. */
async function sessionsOf(client: Farhand, all: boolean) {
  const wishes = all ? [{}] : openStatuses.map((status) => ({ status }));
  const pages = await Promise.all(wishes.map((wish) => client.sessions.list({ ...wish, limit: 100 })));
  const found = pages.flatMap(({ items }) => items);
  return found.sort((a, b) => b.created_at.localeCompare(a.created_at));
}
