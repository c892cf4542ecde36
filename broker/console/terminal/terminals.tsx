// The terminals of a machine: its sessions as tabs, and the emulator of the open one.
import { useEffect } from 'preact/hooks';
import { client } from '../api-client.ts';
import { relativeText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { Button, IconButton } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Placeholder, Show } from '../parts/loading-failed-or-empty.tsx';
import { useClick } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, path, to } from '../router.ts';
import { TerminalView } from './terminal-view.tsx';

type Session = Awaited<ReturnType<typeof client.sessions.list>>['items'][number];

/** Milliseconds that a terminal stays open after its machine has lost the connection to the broker. */
const graceMs = 600_000;

interface TerminalsProps {
  machine: string;
  /** The id of the open session; undefined to open the first one. */
  item: string | undefined;
  status: string;
}

export function Terminals({ machine, item, status }: TerminalsProps) {
  const sessions = useData(
    async (signal) => {
      const { items } = await client.sessions.list({ machine_id: machine, limit: 100 }, { signal });
      return items
        .filter((session) => session.status !== 'DISCONNECTED' || session.session_id === item)
        .reverse();
    },
    [machine, item],
    ({ type, data }) => type.startsWith('session.') && data.machine_id === machine,
  );
  const { busy, click: open } = useClick(() =>
    attempt(async () => {
      const before = path.peek();
      const { session_id } = await client.sessions.create({ machine_id: machine, grace_period: graceMs });
      // On another page, the terminal would take the focus, and what the user types there would go to the shell.
      if (path.peek() === before) go(to('/machines', machine, 'terminals', session_id));
    }),
  );
  const first = sessions.data?.find((session) => session.status !== 'DISCONNECTED')?.session_id;
  useEffect(() => {
    if (item === undefined && first !== undefined)
      go(to('/machines', machine, 'terminals', first), { replace: true });
  }, [item, first, machine]);
  const canOpen = may('sessions:attach') && status === 'online';
  return (
    <Show of={sessions}>
      {(all) =>
        all.length === 0 && item === undefined ? (
          <NoTerminals status={status} canOpen={canOpen} busy={busy} open={open} />
        ) : (
          <div class="terminals">
            <SessionTabs
              sessions={all}
              machine={machine}
              current={item}
              open={canOpen ? open : undefined}
              busy={busy}
            />
            {item === undefined ? (
              <Placeholder />
            ) : (
              <TerminalView key={item} session={item} reload={sessions.reload} />
            )}
          </div>
        )
      }
    </Show>
  );
}

interface NoTerminalsProps {
  status: string;
  canOpen: boolean;
  busy: boolean;
  open: () => void;
}

function NoTerminals({ status, canOpen, busy, open }: NoTerminalsProps) {
  return (
    <Empty icon={icons.terminal} title="No terminal is open">
      <p>A terminal stays open when you close this page, and others can join it.</p>
      {status !== 'online' && (
        <p>The machine is offline: a terminal can be opened when it is online again.</p>
      )}
      {!may('sessions:attach') && <p>Opening a terminal needs a key with the scope sessions:attach.</p>}
      {canOpen && (
        <Button
          icon={icons.terminal}
          text="Open a terminal"
          class="primary"
          aria-disabled={busy}
          press={open}
        />
      )}
    </Empty>
  );
}

interface SessionTabsProps {
  sessions: readonly Session[];
  machine: string;
  current: string | undefined;
  open: (() => void) | undefined;
  busy: boolean;
}

function SessionTabs({ sessions, machine, current, open, busy }: SessionTabsProps) {
  return (
    <div class="session-tabs">
      <nav aria-label="Sessions">
        {sessions.map(({ session_id, shell, created_at, attached_count }) => (
          <a
            key={session_id}
            href={to('/machines', machine, 'terminals', session_id)}
            aria-current={session_id === current ? 'page' : undefined}
            title={`Opened ${relativeText(created_at)}; ${attached_count} attached`}
          >
            <Icon of={icons.terminal} size={14} />
            {shell?.replace(/.*\//, '') ?? 'shell'}
            <span class="muted">{session_id.slice(-4)}</span>
          </a>
        ))}
      </nav>
      {open && <IconButton icon={icons.join} label="New terminal" aria-disabled={busy} press={open} />}
    </div>
  );
}
