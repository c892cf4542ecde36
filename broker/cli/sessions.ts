// farhand sessions: terminals that are open.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { printView, routeVerb } from './resource-verbs.ts';
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
  routeVerb(sessions, 'end', 'sessions', 'end', { view: { fields: 'session=session_id status' } });
}

const openStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD'] as const;

/** At most a hundred of each status that is asked for, the latest first. */
async function list(client: Farhand, { all, output }: Common & { all?: boolean }): Promise<void> {
  const wishes = all ? [{}] : openStatuses.map((status) => ({ status }));
  const pages = await Promise.all(wishes.map((wish) => client.sessions.list({ ...wish, limit: 100 })));
  const found = pages.flatMap(({ items }) => items).sort((a, b) => b.created_at.localeCompare(a.created_at));
  const fields = 'id=session_id status machine attached=attached_count opened=created_at';
  await printView(client, output, found, { fields });
}
