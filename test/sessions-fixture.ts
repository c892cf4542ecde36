// Helpers for tests of sessions: a scripted agent whose calls are read by method, terminals on it, and clients.
import { EventEmitter, once } from 'node:events';
import type { Action, ClientPort, CloseReason, Notice } from '../broker/sessions/terminal-client.ts';
import type { Hello } from '../proto/types/farhand/link/v1/Hello.ts';
import { methods } from '../shared/agent-rpcs.ts';
import type { MachineId } from '../shared/api/shared-schemas.ts';
import { joinScripted, linkScripted, type ScriptedAgent } from './scripted-agent.ts';
import { startFarhand, type TestSystem } from './start-farhand.ts';

type Request = Record<string, unknown> & { id: string };

/** A call of the broker, with its request. */
export interface Call {
  request: Request;
  call_id: string;
}

/** A linked machine. The test reads its calls by method. */
export interface Machine {
  agent: ScriptedAgent;
  machine_id: MachineId;
  next(method: string): Promise<Call>;
  /** Returns the number of calls of this method that the test has not read. */
  waiting(method: string): number;
}

export async function linkMachine(
  grpc: string,
  identity: Awaited<ReturnType<typeof joinScripted>>,
  hello: Partial<Hello> = {},
): Promise<Machine> {
  const agent = await linkScripted(grpc, identity, hello);
  return {
    agent,
    machine_id: identity.machineId as MachineId,
    waiting: (method) => agent.unreadCallsOf(method),
    async next(method) {
      const call = await agent.nextCallOf(method);
      return { request: agent.decode(call) as Request, call_id: call.call_id };
    },
  };
}

/** A system with one scripted machine, which can link again. */
export async function bench(params: { hello?: Partial<Hello>; system?: TestSystem } = {}) {
  const system = params.system ?? (await startFarhand());
  const identity = await joinScripted(system);
  const link = (hello: Partial<Hello> = {}, grpc = system.grpc) =>
    linkMachine(grpc, identity, { ...params.hello, ...hello });
  const machine = await link();
  return { system, machine, machine_id: machine.machine_id, link };
}

/** Answers a small call with an empty message. */
export function ok({ agent }: Machine, { call_id }: Call): void {
  agent.send({ reply: { call_id, response: Buffer.alloc(0) } });
}

/** Refuses a call of any kind. */
export function refuse({ agent }: Machine, { call_id }: Call, code: string): void {
  agent.send({ reply: { call_id, error: { code, message: 'no', details: '{}' } } });
}

/** Returns functions that report the state of a terminal to its session. */
export function keeper({ agent }: Machine, { call_id }: Call) {
  const stream = agent.answer(call_id);
  const send = (event: object): void =>
    void stream.write({ message: agent.encode('OpenTerminal', { event }) });
  return {
    started: () => send({ started: { pid: 1, started_at_ms: Date.now() } }),
    exit(exit: object = {}) {
      send({ exit: { outcome: 'PROCESS_OUTCOME_EXITED', started_at_ms: 1, finished_at_ms: 2, ...exit } });
      stream.write({ end: {} });
      stream.end();
    },
  };
}

/** The agent's side of a client that is attached to a terminal. */
export function attached({ agent }: Machine, { call_id }: Call) {
  const stream = agent.answer(call_id);
  const seen: Record<string, unknown>[] = [];
  const arrived = new EventEmitter();
  const shape = methods.get('AttachTerminal');
  stream.on('data', ({ message }: { message?: Buffer }) => {
    if (message) seen.push(shape?.decodeRequest(message) as Record<string, unknown>);
    arrived.emit('message');
  });
  const send = (message: object): void =>
    void stream.write({ message: agent.encode('AttachTerminal', message) });
  const next = async <T>(kind: string): Promise<T> => {
    for (;;) {
      const at = seen.findIndex((message) => message.message === kind);
      const [found] = at < 0 ? [] : seen.splice(at, 1);
      if (found) return found[kind] as T;
      await once(arrived, 'message');
    }
  };
  return {
    stream,
    open: () => next<{ id: string; client_id: string; offset?: number }>('open'),
    /** Resolves with the input once it has this length. */
    async input(length: number): Promise<string> {
      let text = '';
      while (text.length < length) text += (await next<Buffer>('input')).toString();
      return text;
    },
    size: () => next<{ cols: number; rows: number }>('size'),
    signal: () => next<string>('signal'),
    async taken(at: number): Promise<number> {
      for (;;) {
        const taken = await next<number>('taken');
        if (taken >= at) return taken;
      }
    },
    /** True if a message of this kind has arrived. */
    has: (kind: string) => seen.some((message) => message.message === kind),
    head: (
      offset = 0,
      size = { cols: 80, rows: 24 },
      { known = false, ...count }: { known?: boolean; input_taken?: number } = {},
    ) => send({ head: { offset, size, known }, ...count }),
    /** Acknowledges the input up to this offset. */
    confirm: (input_taken: number) => send({ input_taken }),
    output: (offset: number, data: string | Buffer) => send({ output: { offset, data: Buffer.from(data) } }),
    resized: (cols: number, rows: number) => send({ size: { cols, rows } }),
    refuse(code: string) {
      stream.write({ error: { code, message: 'no', details: '{}' } });
      stream.end();
    },
    end() {
      stream.write({ end: {} });
      stream.end();
    },
  };
}

/** A client without a network connection, whose reading and sending the test controls. */
export function createPort() {
  const gone = new AbortController();
  const happened = new EventEmitter();
  happened.setMaxListeners(100);
  const actions: Action[] = [];
  const notes: Notice[] = [];
  const taken: Buffer[] = [];
  let given = 0;
  let held: (() => void)[] | undefined;
  const take = (): Promise<void> => {
    const waiting = held;
    happened.emit('change');
    return waiting ? new Promise((resolve) => waiting.push(resolve)) : Promise.resolve();
  };
  let parting: CloseReason | undefined;
  let read = 0;
  const until = async <T>(look: () => T | undefined): Promise<T> => {
    for (;;) {
      const found = look();
      if (found !== undefined) return found;
      await once(happened, 'change');
    }
  };
  const port: ClientPort = {
    gone: gone.signal,
    output(bytes) {
      given += bytes.length;
      taken.push(Buffer.from(bytes));
      return take();
    },
    notify(note) {
      notes.push(note);
      return take();
    },
    close(received) {
      if (parting) throw new Error('parted twice');
      parting = received;
      happened.emit('change');
    },
    actions: (async function* () {
      for (;;) {
        const doing = await until(
          () => actions.shift() ?? (gone.signal.aborted || parting ? null : undefined),
        );
        if (!doing) return;
        read += 1;
        yield doing;
      }
    })(),
  };
  return {
    port,
    notes,
    do(...all: Action[]) {
      actions.push(...all);
      happened.emit('change');
    },
    type: (text: string) => {
      actions.push({ input: Buffer.from(text) });
      happened.emit('change');
    },
    /** Returns how many actions of the client the session has read. */
    read: () => read,
    /** Returns how many bytes were sent to the client, received or not. */
    given: () => given,
    text: () => Buffer.concat(taken).toString(),
    /** From now on the client receives nothing until release(). */
    hold() {
      held = [];
    },
    release() {
      const waiting = held ?? [];
      held = undefined;
      for (const resolve of waiting) resolve();
    },
    leave() {
      gone.abort();
      happened.emit('change');
    },
    note: <T extends Notice['type']>(type: T) =>
      until(() => notes.find((note): note is Notice & { type: T } => note.type === type)),
    status: (status: string) =>
      until(() => notes.find((note) => note.type === 'status' && note.status === status)),
    gets: (length: number) => until(() => (given >= length ? given : undefined)),
    parted: () => until(() => parting),
  };
}

/** Returns the ticket in a stream_url. */
export function ticketIn(url: string): string {
  return new URL(url).searchParams.get('ticket') ?? '';
}

/** Returns the events of a session with their status, oldest first. */
export async function eventsOf({ client }: TestSystem, session_id: string): Promise<string[]> {
  const { items } = await client.events.list({ limit: 100, sort: 'created_at' });
  return items
    .filter(({ data }) => data.session_id === session_id)
    .map(({ type, data }) => [type.replace('session.', ''), data.status, data.mode].join(' ').trim());
}

/** Starts a session with a running terminal. */
export async function begin(
  { system, machine }: { system: TestSystem; machine: Machine },
  params: object = {},
) {
  const { machine_id } = machine;
  const made = system.client.sessions.create({ machine_id, ...params });
  const call = await machine.next('OpenTerminal');
  const kept = keeper(machine, call);
  kept.started();
  const session = await made;
  return { session, session_id: session.session_id, call, kept };
}

/** Attaches a client to a session, and serves it. */
export async function join(
  { system, machine }: { system: TestSystem; machine: Machine },
  session_id: string,
  params: { mode?: 'operator' | 'observer'; offset?: number } = {},
  client = system.client,
) {
  const made = await client.sessions.attach({ session_id, ...params });
  const attachment = system.broker.sessions.redeem(ticketIn(made.stream_url));
  if (!attachment) throw new Error('the ticket was not good');
  const port = createPort();
  const served = attachment.serve(port.port);
  const line = attached(machine, await machine.next('AttachTerminal'));
  const open = await line.open();
  return { ...port, client_id: made.client_id, line, open, served };
}
