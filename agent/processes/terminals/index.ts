// Opens the terminals of this machine, keeps them alive for the broker, and attaches clients to them.
import type { AttachTerminalOpen__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { AttachTerminalResponse } from '../../../proto/types/farhand/agent/v1/AttachTerminalResponse.ts';
import type { KeepTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/KeepTerminalRequest.ts';
import type { OpenTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/OpenTerminalRequest.ts';
import type { TerminalEvent } from '../../../proto/types/farhand/agent/v1/TerminalEvent.ts';
import type { TerminalSpec__Output } from '../../../proto/types/farhand/agent/v1/TerminalSpec.ts';
import { type AgentCall, gaveUp } from '../../../shared/agent-rpcs.ts';
import { AppError, fromErrno } from '../../../shared/errors.ts';
import { leaving } from '../follow-output.ts';
import { terminalPlan } from '../launch-plan.ts';
import { type Parts, type Prepared, ProcessTable } from '../process-table.ts';
import { checkedSize, Pty, type PtyMaker } from './pty.ts';
import { Terminal } from './terminal.ts';
import type { Client } from './terminal-client.ts';

interface TerminalParts extends Parts {
  /** Undefined if the pseudo terminal addon does not exist for this machine. */
  maker: PtyMaker | undefined;
}

type Requests = AsyncIterable<AttachTerminalRequest__Output>;

export class Terminals {
  readonly table: ProcessTable<Terminal>;
  readonly #parts: TerminalParts;

  /** The table begins with the terminals of earlier agents, all of them over. */
  constructor(parts: TerminalParts) {
    this.#parts = parts;
    const kind = {
      name: 'terminal',
      notFound: 'session_not_found',
      limit: parts.limits.terminals,
      create: () => new Terminal(parts.limits),
    } as const;
    const earlier = [...parts.journal.entries].filter(([, { terminal }]) => terminal);
    const entries = earlier.map(([id, entry]) => [id, kind.create().restore(entry)] as const);
    this.table = new ProcessTable(parts, kind, new Map(entries));
  }

  open({ id, spec }: OpenTerminalRequest__Output, call: AgentCall): AsyncIterable<{ event: TerminalEvent }> {
    return this.#keep(call, async () => {
      const { maker } = this.#parts;
      if (!maker) throw new AppError('not_supported', 'terminals are not supported on this kind of machine');
      if (!spec) throw new AppError('invalid_request', 'a terminal needs a spec');
      const size = checkedSize(spec.size);
      return this.table.start(id, call.signal, (terminal) => {
        terminal.size = size;
        terminal.graceMs = spec.grace_ms;
        return this.#prepare(id, spec, terminal, maker);
      });
    });
  }

  keep({ id }: KeepTerminalRequest__Output, call: AgentCall): AsyncIterable<{ event: TerminalEvent }> {
    return this.#keep(call, async () => this.table.find(id), true);
  }

  attach(requests: Requests, { signal }: AgentCall): AsyncIterable<AttachTerminalResponse> {
    const incoming = requests[Symbol.asyncIterator]();
    return leaving(signal, (left) => this.#attach(incoming, left));
  }

  async #prepare(
    id: string,
    spec: TerminalSpec__Output,
    terminal: Terminal,
    maker: PtyMaker,
  ): Promise<Prepared> {
    const plan = await terminalPlan(id, spec);
    const { log, limits } = this.#parts;
    const pty = new Pty(maker, { id, plan, size: terminal.size, output: terminal.output, log });
    terminal.pty = pty;
    // An interactive shell ignores SIGTERM, so a kill begins with SIGHUP.
    return { plan, stdio: pty, first: 'SIGHUP', leftoversMs: limits.hangupMs, timeoutMs: 0 };
  }

  /** `found`: the terminal was opened by an earlier call. */
  #keep(
    call: AgentCall,
    find: () => Promise<Terminal>,
    found = false,
  ): AsyncIterable<{ event: TerminalEvent }> {
    return leaving(call.signal, async function* (left) {
      const terminal = await find();
      if (left.aborted) return terminal.keep()();
      left.addEventListener('abort', terminal.keep(), { once: true });
      yield* events(terminal, left, found);
    });
  }

  async *#attach(
    incoming: AsyncIterator<AttachTerminalRequest__Output>,
    signal: AbortSignal,
  ): AsyncGenerator<AttachTerminalResponse> {
    const first = await incoming.next();
    const open = first.done ? undefined : first.value.open;
    if (!open?.client_id)
      throw new AppError('invalid_request', 'a client says first to which terminal it goes');
    const terminal = await this.table.begun(open.id, signal);
    if (signal.aborted) return;
    const client = this.#join(terminal, open);
    const leave = (): void => {
      client.end(signal.reason === gaveUp ? 'left' : 'lost');
      terminal.detach(open.client_id, client, client.parting === 'lost');
    };
    signal.addEventListener('abort', leave, { once: true });
    void listen(incoming, client);
    yield* client.answers(signal);
  }

  #join(terminal: Terminal, { client_id, offset }: AttachTerminalOpen__Output): Client {
    const { clients: limit } = this.#parts.limits;
    const open = [...this.table.all()].reduce((sum, { clients }) => sum + clients, 0);
    if (open >= limit && !terminal.knows(client_id)) {
      throw new AppError('unavailable', `${limit} clients are on this machine already`, { limit });
    }
    return terminal.attach(client_id, offset);
  }
}

async function* events(
  terminal: Terminal,
  signal: AbortSignal,
  found: boolean,
): AsyncGenerator<{ event: TerminalEvent }> {
  await terminal.begun(signal);
  const { started } = terminal;
  // A later call about a terminal that is over gets only its exit, without "started".
  if (started && !(found && terminal.exit) && !signal.aborted)
    yield { event: { started: { pid: started.pid, started_at_ms: started.at } } };
  while (!terminal.exit && !signal.aborted) await terminal.changed.wait(signal);
  if (terminal.exit && !signal.aborted) yield { event: { exit: terminal.exit } };
}

/**
 * Handles the messages of a client until its stream ends. It reads on after an error, so that the stream can
 * end. Never rejects.
 */
async function listen(incoming: AsyncIterator<AttachTerminalRequest__Output>, client: Client): Promise<void> {
  for (;;) {
    const next = await incoming.next().catch(() => undefined);
    if (!next || next.done) return client.end(next ? 'left' : 'lost');
    await client.take(next.value).catch((error: unknown) => client.end(fromErrno(error, 'terminal')));
  }
}
