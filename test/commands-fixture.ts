// Helpers for tests of commands: gates at which commands wait, output as bytes or events, and a clock that the test
// sets.
import { execFileSync } from 'node:child_process';
import { closeSync, constants, openSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished } from 'vitest';
import { setClock } from '../shared/clock.ts';
import type { Farhand } from '../shared/sdk/index.ts';
import { type LeapingClock, startLeapingClock } from './leaping-clock.ts';
import { joinScripted, linkScripted, type ScriptedAgent } from './scripted-agent.ts';
import { type AgentOptions, startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';

export type CommandRecord = Awaited<ReturnType<Farhand['commands']['get']>>;
export type StreamEvent =
  Awaited<ReturnType<Farhand['commands']['stream']>> extends AsyncIterable<infer T> ? T : never;

/** Polls until an expectation is met. Used for changes that cause no event. */
export function soon<T>(read: () => T | Promise<T>, interval = 20) {
  return expect.poll(read, { interval });
}

/** A named pipe at which a command waits until the test opens the gate. */
export interface Gate {
  /** A shell command that waits at the gate. */
  wait: string;
  /** Lets one waiting command continue, or the next one that arrives. */
  open(): void;
}

export function gate(): Gate {
  const path = join(temporaryFolder('gate'), 'gate');
  execFileSync('mkfifo', [path]);
  // Open for reading and writing, so that open() never blocks, and so that written bytes stay until a command reads
  // them.
  const fd = openSync(path, constants.O_RDWR);
  onTestFinished(() => closeSync(fd));
  return { wait: `head -c 1 ${path} >/dev/null`, open: () => void writeSync(fd, 'x') };
}

/** A broker with one machine, and functions for commands on it. */
export async function bench(params: AgentOptions & { brokerFlags?: string[] } = {}) {
  const system = await startFarhand(params.brokerFlags ? { flags: params.brokerFlags } : {});
  const proxy = await startProxy(system.grpc);
  const agent = await system.agent({ ...params, through: proxy.address });
  return { system, proxy, agent, machine_id: agent.machineId, ...commandsOn(system, agent.machineId) };
}

export function commandsOn(system: TestSystem, machine_id: string) {
  const { client } = system;
  return {
    /** Starts a command without waiting for its end. */
    async begin(command: string, more: object = {}): Promise<string> {
      return (await client.commands.async({ machine_id, command, ...more })).id;
    },
    run: (command: string, more: object = {}) =>
      client.commands.create({ machine_id, command, wait: 50_000, ...more }),
    get: (command_id: string) => client.commands.get({ command_id }),
    /** Resolves with the record of a command after its end. */
    async ended(command_id: string): Promise<CommandRecord> {
      await lastEvent(system, command_id);
      return client.commands.get({ command_id });
    },
  };
}

/**
 * Requests the output of a command, or its events if `what` is "stream". Resolves with the response before its body is
 * read.
 */
export function output(
  { url, key }: Pick<TestSystem, 'url' | 'key'>,
  id: string,
  query = '',
  init: RequestInit = {},
  what: 'output' | 'stream' = 'output',
): Promise<Response> {
  const headers = { Authorization: `Bearer ${key}` };
  return fetch(`${url}/api/v1/commands/${id}/${what}?${query}`, { headers, ...init });
}

export async function bodyBytes(response: Response): Promise<Buffer> {
  return Buffer.from(await response.arrayBuffer());
}

/** Returns status, X-Output-Offset and text of a response to GET output, or its error. */
export async function answerOf(response: Response): Promise<unknown> {
  const text = await response.text();
  if (!response.ok) return [response.status, JSON.parse(text).error.code, JSON.parse(text).error.details];
  return [response.status, response.headers.get('x-output-offset'), text];
}

export interface Received {
  stdout: Buffer;
  stderr: Buffer;
  gaps: [from: number, to: number][];
  events: StreamEvent[];
  /** Id of the last event. */
  at: string;
  exit: boolean;
}

export function nothingReceived(): Received {
  return { stdout: Buffer.alloc(0), stderr: Buffer.alloc(0), gaps: [], events: [], at: '', exit: false };
}

/**
 * Adds an event to the received ones. Throws if the event repeats bytes of the output, or leaves out bytes without an
 * event `gap`.
 */
function hear(received: Received, event: StreamEvent): void {
  received.events.push(event);
  received.at = event.id ?? '';
  const { data } = event;
  if ('encoding' in data) {
    const bytes = Buffer.from(data.data, data.encoding === 'base64' ? 'base64' : 'utf8');
    const lost = received.gaps.reduce((sum, [from, to]) => sum + to - from, 0);
    const have = received[data.stream].length + (data.stream === 'stdout' ? lost : 0);
    if (data.offset !== have) throw new Error(`${data.stream}: ${data.offset} came after ${have}`);
    received[data.stream] = Buffer.concat([received[data.stream], bytes]);
  } else if ('from' in data) received.gaps.push([data.from, data.to]);
  else received.exit = true;
}

/** Reads a stream of events to its end, or until `enough` is true. */
export async function listen(
  { client }: Pick<TestSystem, 'client'>,
  command_id: string,
  received = nothingReceived(),
  enough: (received: Received) => boolean = () => false,
): Promise<Received> {
  const stop = new AbortController();
  const last = received.at === '' ? {} : { last_event_id: received.at };
  const events = await client.commands.stream({ command_id, ...last }, { signal: stop.signal });
  for await (const event of events) {
    hear(received, event);
    if (received.exit || enough(received)) break;
  }
  stop.abort();
  return received;
}

async function lastEvent({ client }: Pick<TestSystem, 'client'>, command_id: string): Promise<void> {
  for await (const { event } of await client.commands.stream({ command_id })) if (event === 'exit') return;
  throw new Error('the stream of events ended without an exit');
}

/** Replaces the clock of this process with a leaping one until the test ends. */
export function leapingClock(options?: { still?: boolean }): LeapingClock {
  onTestFinished(() => setClock());
  return startLeapingClock(options);
}

/**
 * Resolves with the next call to a scripted agent, and skips calls of ForgetProcesses. Throws if the call is not of
 * `method`.
 */
export async function nextCall(
  agent: ScriptedAgent,
  method: 'StartProcess' | 'FollowProcess' | 'KillProcess',
) {
  let call = await agent.next('call');
  while (call.method === 'ForgetProcesses') call = await agent.next('call');
  if (call.method !== method) throw new Error(`a ${call.method} came instead of a ${method}`);
  const request = agent.decode(call) as { id: string; stdout_offset?: number; spec?: object };
  return { ...request, call_id: call.call_id };
}

/** Returns functions that send the events of an answer to a call, one by one. */
export function reporting(agent: ScriptedAgent, call_id: string) {
  const stream = agent.answer(call_id);
  const send = (event: object): void =>
    void stream.write({ message: agent.encode('StartProcess', { event }) });
  return {
    send,
    started: () => send({ started: { pid: 1, started_at_ms: Date.now() } }),
    stdout: (offset: number, data: Buffer | string) =>
      send({ output: { stream: 'OUTPUT_STREAM_STDOUT', offset, data: Buffer.from(data) } }),
    gap: (from: number, to: number) => send({ gap: { stream: 'OUTPUT_STREAM_STDOUT', from, to } }),
    exited(stdout_bytes: number) {
      const times = { started_at_ms: Date.now(), finished_at_ms: Date.now() };
      send({ exit: { outcome: 'PROCESS_OUTCOME_EXITED', stdout_bytes, ...times } });
    },
    unknown: (reason = 'unknown_id') => send({ exit: { outcome: 'PROCESS_OUTCOME_EXPIRED', reason } }),
    refused(code: string) {
      stream.write({ error: { code, message: 'no', details: '{}' } });
      stream.end();
    },
    end() {
      stream.write({ end: {} });
      stream.end();
    },
  };
}

/** Links a scripted machine and cuts its link, so that it is offline. `back` links it again. */
export async function scriptedAway(system: TestSystem) {
  const identity = await joinScripted(system);
  const back = (): Promise<ScriptedAgent> => linkScripted(system.grpc, identity);
  const leave = async (agent: ScriptedAgent): Promise<void> => {
    agent.control.cancel();
    await agent.ended;
    // The broker must have noticed that the link has ended.
    await soon(
      async () => (await system.client.machines.get({ machine_id: identity.machineId })).status,
    ).toBe('offline');
  };
  await leave(await back());
  return { machine_id: identity.machineId, back, leave, ...commandsOn(system, identity.machineId) };
}
