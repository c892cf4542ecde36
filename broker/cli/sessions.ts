// farhand sessions: terminals that are open.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { namesOf } from './named.ts';
import { printFields, printTable, when } from './output.ts';
import { show } from './shell.ts';
import { bareVerb, type Common, verb, withClient } from './verb.ts';

export function addSessions(program: Command): void {
  const sessions = program.command('sessions').description('terminals on machines');
  verb(sessions, 'list', 'sessions that have not ended, the latest first', 'farhand sessions list --all')
    .option('--all', 'the latest hundred, ended ones too')
    .action(withClient(list));
  bareVerb(
    sessions,
    'attach <session>',
    'show a session here; Ctrl-] detaches',
    'farhand sessions attach sess_… --observe',
  )
    .option('--observe', 'only look')
    .action(
      withClient(async (client, session: string, { observe }: Common & { observe?: boolean }) => {
        process.exitCode = await show(client, session, observe ?? false);
      }),
    );
  verb(
    sessions,
    'end <session>',
    'end a session and everything that runs in it',
    'farhand sessions end sess_…',
  ).action(
    withClient(async (client, session_id: string, { output }: Common) => {
      const ended = await client.sessions.end({ session_id });
      await printFields(output, ended, { session: ended.session_id, status: ended.status });
    }),
  );
}

async function list(client: Farhand, { all = false, output }: Common & { all?: boolean }): Promise<void> {
  const found = await sessionsOf(client, all);
  const nameOf = output === 'json' ? String : await namesOf(client);
  await printTable(output, found, {
    id: ({ session_id }) => session_id,
    status: ({ status }) => status,
    machine: ({ machine_id }) => nameOf(machine_id),
    attached: ({ attached_count }) => attached_count,
    opened: ({ created_at }) => when(created_at),
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
