// The rpcs Exec and FollowCommand: a command's input and output as gRPC streams.
import type { CommandEnd } from '../../proto/types/farhand/client/v1/CommandEnd.ts';
import type { ExecStart__Output } from '../../proto/types/farhand/client/v1/ExecStart.ts';
import { present } from '../../shared/agent-rpcs.ts';
import { mostVariables } from '../../shared/api/commands.ts';
import { api, type Caller, type Input } from '../../shared/api/route-table.ts';
import type { CommandId } from '../../shared/api/shared-schemas.ts';
import { sleep } from '../../shared/clock.ts';
import { AppError, type Code, fieldError } from '../../shared/errors.ts';
import { type Commands, offsetsIn } from '../commands/command-handlers.ts';
import { createRecall, type Guard, guardOf, nothing } from '../request-checks/authorize-and-perform.ts';
import type { Call, Rpc, Sent, StreamsServices } from './incoming-call.ts';

type Part = Sent<'FollowCommand'> & Sent<'Exec'>;

const { create, stream: follow, signal: signalRoute } = api.commands;

/** Errors after which input is sent again, because they may be temporary. */
const retryableCodes: readonly Code[] = ['unavailable', 'machine_offline', 'machine_timeout'];
const firstWaitMs = 10;
const longestWaitMs = 500;

export function commandRpcs(services: StreamsServices) {
  const { handlers, commands, idempotency, log } = services;
  const recall = createRecall(handlers, 'commands', 'get', services);
  const signalling = guardOf(signalRoute, services);

  const Exec: Rpc<'Exec', typeof create> = {
    guard: guardOf(create, services),
    first: 'start',
    raw: (start) => ({ body: bodyOf(start) }),
    async run(call, { input, caller }, start) {
      // Creates the command, or finds the earlier one with the same idempotency key.
      const reply = await idempotency.answer({
        ...{ route: create, caller, body: bodyOf(start), recall, query: '', content: undefined },
        key: call.header('idempotency-key') || undefined,
        path: '/farhand.client.v1.Streams/Exec',
        run: () => handlers.commands.create(input, caller),
      });
      const { id: command_id } = create.reply.pick({ id: true }).parse(reply);
      try {
        await call.send({ accepted: { command_id } });
        void sendClientMessages({ services, signalling, call, command_id, caller });
        const parts = await commands.follow(command_id, offsetsIn(), caller.signal);
        for await (const part of parts) await call.send(partOf(part));
        return undefined;
      } catch (error) {
        if (start.cancel_on_disconnect && call.abandoned) {
          await Promise.resolve(handlers.commands.cancel({ command_id }, caller)).catch((err: unknown) =>
            log.error({ err, command_id }, 'a command whose client disconnected could not be cancelled'),
          );
        }
        throw error;
      }
    },
  };

  const FollowCommand: Rpc<'FollowCommand', typeof follow> = {
    guard: guardOf(follow, services),
    raw: ({ command_id, stdout_offset, stderr_offset }) => ({
      params: { command_id },
      headers: { last_event_id: `${stdout_offset}.${stderr_offset}` },
    }),
    async run(call, { input, caller }) {
      const from = offsetsIn(input.last_event_id);
      for await (const part of await commands.follow(input.command_id, from, caller.signal)) {
        await call.send(partOf(part));
      }
      return undefined;
    },
  };
  return { Exec, FollowCommand };
}

/** An accepted call of Exec. */
interface Execution {
  services: StreamsServices;
  signalling: Guard<typeof signalRoute>;
  call: Call<'Exec'>;
  command_id: CommandId;
  caller: Caller;
}

/**
 * Sends a client's input and signals to its command, in order, until the client half-closes. Never rejects: an error
 * aborts the call.
 */
async function sendClientMessages(execution: Execution): Promise<void> {
  const { call } = execution;
  let offset = 0;
  try {
    for await (const { message, stdin = Buffer.alloc(0), signal = '' } of call.messages) {
      if (message === 'stdin') {
        // The await keeps the client from sending faster than the command reads its input.
        await sendInput(execution, stdin, offset);
        offset += stdin.length;
      } else if (message === 'signal') await sendSignal(execution, signal);
      else
        throw new AppError(
          'invalid_request',
          'every message after the first must have the field stdin or signal',
        );
    }
    await call.assertConnected();
    await sendInput(execution, Buffer.alloc(0), offset, true);
  } catch (error) {
    call.gone.abort(error);
  }
}

/** Sends input. Resolves when the machine has all of these bytes. */
async function sendInput(
  { services, command_id, caller }: Execution,
  bytes: Buffer,
  offset: number,
  end = false,
): Promise<void> {
  let given = 0;
  await retrying(caller.signal, retryableCodes, async () => {
    const data = bytes.toString('base64', given);
    const input = { command_id, data, encoding: 'base64', offset: offset + given, end } as const;
    try {
      await services.handlers.commands.input(input, caller);
    } catch (error) {
      // The next try begins after the bytes that the agent has accepted, to save traffic. If bytes are sent twice, the
      // agent recognizes them by their offset and skips them.
      if (error instanceof AppError) given += Number(error.details.given ?? 0);
      throw error;
    }
  });
}

/** Sends a signal as a request of its own, which counts toward the rate limit and has an audit record. */
async function sendSignal(
  { services: { rates, handlers }, signalling, call, command_id, caller }: Execution,
  signal: string,
): Promise<void> {
  const quota = await rates.spend(caller.key_id);
  const work = {
    read: () => ({ ...nothing, params: { command_id }, body: { signal } }),
    lasts: false,
    act: (input: Input<typeof signalRoute>, own: Caller) =>
      retrying(own.signal, [], async () => handlers.commands.signal(input, own)),
  };
  await call.request(signalling, work, quota);
}

/**
 * Calls `attempt` until it succeeds. Calls it again after an error with one of `codes`, and while the command has not
 * started. Also resolves if the command has ended or its input is closed. Rejects on any other error.
 */
async function retrying(
  signal: AbortSignal,
  codes: readonly Code[],
  attempt: () => Promise<unknown>,
): Promise<void> {
  for (let wait = firstWaitMs; ; wait = Math.min(2 * wait, longestWaitMs)) {
    try {
      await attempt();
      return;
    } catch (error) {
      signal.throwIfAborted();
      if (!(error instanceof AppError)) throw error;
      const early = error.code === 'conflict' && error.details.started === false;
      if (error.code === 'conflict' && !early) return;
      if (!early && !codes.includes(error.code)) throw error;
      await sleep(wait, signal);
    }
  }
}

/** Converts the first message of Exec to the body of POST /commands. */
function bodyOf(start: ExecStart__Output) {
  const { machine_id, command, direct, args, cwd, env, user, timeout_ms, queue_for_ms } = start;
  // The number of variables is checked first, because a message can contain many thousands of them.
  if (Object.keys(env).length > mostVariables) {
    throw fieldError('body', 'env', `has too many variables: send at most ${mostVariables}`);
  }
  return {
    machine_id,
    command,
    ...(direct && { args }),
    ...present({ cwd, user }),
    ...(Object.keys(env).length > 0 && { env }),
    ...(timeout_ms > 0 && { timeout: timeout_ms }),
    ...(queue_for_ms > 0 && { queue_for: queue_for_ms }),
    input: true,
    wait: 0,
  };
}

const streamNames = { stdout: 'OUTPUT_STREAM_STDOUT', stderr: 'OUTPUT_STREAM_STDERR' } as const;

type FollowPart = Awaited<ReturnType<Commands['follow']>> extends AsyncIterable<infer T> ? T : never;

function partOf(part: FollowPart): Part {
  if ('end' in part) return { end: endOf(part.end) };
  const stream = streamNames[part.stream];
  if ('from' in part) return { gap: { stream, from: part.from, to: part.to } };
  return { output: { stream, offset: part.offset, data: part.data } };
}

function endOf({ status, duration, ...end }: Extract<FollowPart, { end: unknown }>['end']): CommandEnd {
  const { exit_code, signal, reason } = end;
  const duration_ms = duration === null ? null : Math.round(duration);
  return { status, ...present({ exit_code, signal, reason, duration_ms }) };
}
