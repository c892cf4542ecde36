// Opens the terminals of this machine, keeps them alive for the broker, and attaches clients to them.
import type { AttachTerminalOpen__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { AttachTerminalResponse } from '../../../proto/types/farhand/agent/v1/AttachTerminalResponse.ts';
import type { TerminalEvent } from '../../../proto/types/farhand/agent/v1/TerminalEvent.ts';
import type { TerminalSpec__Output } from '../../../proto/types/farhand/agent/v1/TerminalSpec.ts';
import { type AgentMethods, gaveUp } from '../../../shared/agent-rpcs.ts';
import { AppError, fromErrno } from '../../../shared/errors.ts';
import { leaving, startedEvent } from '../follow-output.ts';
import { terminalPlan } from '../launch-plan.ts';
import { ProcessRegistry } from '../process-registry.ts';
import type { Parts, Prepared } from '../running-process.ts';
import { checkedSize, Pty, type PtyMaker } from './pty.ts';
import { type Client, Terminal } from './terminal.ts';

interface TerminalParts extends Parts {
  /** Creates pseudo terminals; undefined if node-pty has no addon for this kind of machine. */
  maker: PtyMaker | undefined;
}

type Events = AsyncIterable<{ event: TerminalEvent }>;

type TerminalMethods = Pick<AgentMethods, 'openTerminal' | 'keepTerminal' | 'attachTerminal'>;

export class Terminals extends ProcessRegistry<Terminal, TerminalParts> {
  constructor(parts: TerminalParts) {
    super(parts, { name: 'terminal', notFound: 'session_not_found', limit: parts.limits.terminals });
    const earlier = [...parts.journal.entries].filter(([, { terminal }]) => terminal);
    this.restore(earlier.map(([id, entry]) => this.create(id).restore(entry)));
  }

  protected create(id: string): Terminal {
    return new Terminal(id, this.parts.limits);
  }

  readonly methods: TerminalMethods = {
    openTerminal: ({ id, spec }, { signal }) =>
      this.#keep(signal, async () => {
        const { maker } = this.parts;
        if (!maker)
          throw new AppError(
            'not_supported',
            'the agent cannot open terminals, because it has no node-pty addon for this machine; reinstall the agent',
          );
        if (!spec)
          throw new AppError('invalid_request', 'the request to open a terminal must contain `spec`');
        const size = checkedSize(spec.size);
        return this.start(id, signal, (terminal) => {
          terminal.size = size;
          terminal.graceMs = spec.grace_ms;
          return this.#prepare(spec, terminal, maker);
        });
      }),

    keepTerminal: ({ id }, { signal }) => this.#keep(signal, async () => this.find(id), true),

    attachTerminal: (requests, { signal }) => {
      const incoming = requests[Symbol.asyncIterator]();
      return leaving(signal, (left) => this.#attach(incoming, left));
    },
  };

  async #prepare(spec: TerminalSpec__Output, terminal: Terminal, maker: PtyMaker): Promise<Prepared> {
    const { id, size, output } = terminal;
    const plan = await terminalPlan(id, spec);
    const { log, limits } = this.parts;
    terminal.pty = new Pty(maker, { id, plan, size, output, log });
    // An interactive shell ignores SIGTERM, so a kill begins with SIGHUP.
    return { plan, stdio: terminal.pty, first: 'SIGHUP', leftoversMs: limits.hangupMs, timeoutMs: 0 };
  }

  /** Keeps a terminal alive during the call. `found`: true if an earlier call opened the terminal. */
  #keep(signal: AbortSignal, find: () => Promise<Terminal>, found = false): Events {
    return leaving(signal, async function* (left) {
      const terminal = await find();
      if (left.aborted) return terminal.keep()();
      left.addEventListener('abort', terminal.keep(), { once: true });
      await terminal.begun(left);
      const { started } = terminal;
      // If an earlier call opened the terminal and the terminal is over, only the exit is sent.
      if (started && !(found && terminal.exit) && !left.aborted) yield startedEvent(started);
      while (!terminal.exit && !left.aborted) await terminal.changed.wait(left);
      if (terminal.exit && !left.aborted) yield { event: { exit: terminal.exit } };
    });
  }

  async *#attach(
    incoming: AsyncIterator<AttachTerminalRequest__Output>,
    signal: AbortSignal,
  ): AsyncGenerator<AttachTerminalResponse> {
    const first = await incoming.next();
    const open = first.done ? undefined : first.value.open;
    if (!open?.client_id)
      throw new AppError('invalid_request', 'the first message must contain `open` with a `client_id`');
    const terminal = await this.begun(open.id, signal);
    if (signal.aborted) return;
    const client = this.#join(terminal, open);
    const leave = (): void => {
      client.end(signal.reason === gaveUp ? 'left' : 'lost');
      terminal.detach(open.client_id, client);
    };
    signal.addEventListener('abort', leave, { once: true });
    void listen(incoming, client);
    yield* client.answers(signal);
  }

  #join(terminal: Terminal, { client_id, offset }: AttachTerminalOpen__Output): Client {
    const { clients: limit } = this.parts.limits;
    const open = [...this.all()].reduce((sum, { clients }) => sum + clients, 0);
    if (open >= limit && !terminal.knows(client_id)) {
      const message = `the terminals of this machine have ${limit} clients already, the most allowed; detach one and try again`;
      throw new AppError('unavailable', message, { limit });
    }
    return terminal.attach(client_id, offset);
  }
}

/**
 * Handles the messages of a client until its call ends. After an error, further messages are read but ignored, because
 * the call cannot end while messages are unread. Never rejects.
 */
async function listen(incoming: AsyncIterator<AttachTerminalRequest__Output>, client: Client): Promise<void> {
  for (;;) {
    const next = await incoming.next().catch(() => undefined);
    if (!next || next.done) return client.end(next ? 'left' : 'lost');
    await client.take(next.value).catch((error: unknown) => client.end(fromErrno(error, 'terminal')));
  }
}
