// Exec and FollowCommand: a command's input and output as streams, over the handlers of the commands room.
import type { CommandEnd } from '../../proto/types/farhand/client/v1/CommandEnd.ts';
import type { ExecRequest__Output } from '../../proto/types/farhand/client/v1/ExecRequest.ts';
import type { ExecResponse } from '../../proto/types/farhand/client/v1/ExecResponse.ts';
import type { ExecStart__Output } from '../../proto/types/farhand/client/v1/ExecStart.ts';
import type { FollowCommandRequest__Output } from '../../proto/types/farhand/client/v1/FollowCommandRequest.ts';
import type { FollowCommandResponse } from '../../proto/types/farhand/client/v1/FollowCommandResponse.ts';
import { mostVariables } from '../../shared/api/commands.ts';
import { api, type Caller, type Handlers, type Input } from '../../shared/api/index.ts';
import { type CommandId, commandId } from '../../shared/api/route.ts';
import { monotonic, sleep } from '../../shared/clock.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AccessRooms } from '../admission/access.ts';
import type { Idempotency } from '../admission/idempotency.ts';
import { entranceOf, madeBy } from '../admission/index.ts';
import type { Rates } from '../admission/rates.ts';
import { once } from '../admission/replay.ts';
import { type Commands, offsetsIn } from '../commands/index.ts';
import type { Call } from './call.ts';

export interface CommandStreams extends AccessRooms {
  handlers: Handlers;
  commands: Pick<Commands, 'follow'>;
  idempotency: Idempotency;
  rates: Rates;
  log: Logger;
}

type ExecCall = Call<ExecRequest__Output, ExecResponse>;
type Part = FollowCommandResponse & ExecResponse;

/** What passes by itself, as long as the command runs. */
const passing: readonly Code[] = ['unavailable', 'machine_offline', 'machine_timeout'];
const firstWaitMs = 10;
const longestWaitMs = 500;
/** Of the same signal one is on record in this time, as of typing. */
const recordMs = 60_000;

export function commandCalls(rooms: CommandStreams) {
  const { handlers, commands } = rooms;
  const creating = entranceOf(api.commands.create, rooms);
  const following = entranceOf(api.commands.stream, rooms);
  const signalling = entranceOf(api.commands.signal, rooms);
  const made = madeBy(handlers, { noun: 'commands' }, rooms);

  async function exec(call: ExecCall): Promise<void> {
    const visit = call.knock(creating);
    const start = await call.first((message) => message.start, 'a start');
    const body = bodyOf(start);
    const { input, caller } = call.admit(visit, { body });
    const command_id = await accept(call, body, input, caller);
    try {
      await call.send({ accepted: { command_id } });
      void feed(call, command_id, caller);
      const parts = await commands.follow(command_id, offsetsIn(), caller.signal);
      for await (const part of parts) await call.send(partOf(part));
    } catch (error) {
      if (start.cancel_on_disconnect && call.abandoned) await cancel(command_id, caller);
      throw error;
    }
  }

  /** The command's id once it is on disk; with an idempotency key perhaps that of an earlier call. */
  async function accept(
    call: ExecCall,
    body: object,
    input: Input<typeof api.commands.create>,
    caller: Caller,
  ): Promise<CommandId> {
    const key = call.header('idempotency-key');
    const run = () => handlers.commands.create(input, caller);
    if (key === '') return commandId.parse((await run()).id);
    const reply = await once(rooms.idempotency, {
      route: api.commands.create,
      caller,
      key,
      path: '/farhand.client.v1.Streams/Exec',
      query: '',
      body,
      content: undefined,
      run,
      made,
    });
    return api.commands.create.reply.pick({ id: true }).parse(reply).id;
  }

  async function cancel(command_id: CommandId, caller: Caller): Promise<void> {
    try {
      await handlers.commands.cancel({ command_id }, caller);
    } catch (error) {
      rooms.log.error({ err: error, command_id }, 'a command whose client went could not be cancelled');
    }
  }

  /** Gives the command what its client sends, in order and no faster than it is read. Never rejects. */
  async function feed(call: ExecCall, command_id: CommandId, caller: Caller): Promise<void> {
    let offset = 0;
    const signalled = new Map<string, number>();
    try {
      for await (const { message, stdin, signal } of call.messages) {
        if (message === 'stdin')
          offset = await give(command_id, stdin ?? Buffer.alloc(0), offset, false, caller);
        else if (message === 'signal') await deliver(call, command_id, signal ?? '', signalled);
        else throw new AppError('invalid_request', 'after the first message comes stdin or signal');
      }
      await call.stayed();
      await give(command_id, Buffer.alloc(0), offset, true, caller);
    } catch (error) {
      call.gone.abort(error);
    }
  }

  /** Resolves with the offset after these bytes, once the machine has them all. */
  async function give(
    command_id: CommandId,
    bytes: Buffer,
    offset: number,
    end: boolean,
    caller: Caller,
  ): Promise<number> {
    let given = 0;
    await insisting(caller.signal, passing, async () => {
      const data = bytes.toString('base64', given);
      const at = { command_id, data, encoding: 'base64', offset: offset + given, end } as const;
      await Promise.resolve(handlers.commands.input(at, caller)).catch((error: unknown) => {
        // A repeat is harmless, and a shorter one cheaper.
        if (error instanceof AppError) given += Number(error.details.given ?? 0);
        throw error;
      });
    });
    return offset + bytes.length;
  }

  /** As a request of its own, and counted as one; `signalled` tells when which signal was recorded. */
  async function deliver(
    call: ExecCall,
    command_id: CommandId,
    signal: string,
    signalled: Map<string, number>,
  ): Promise<void> {
    const visit = signalling.knock(call.visitor, call.requestId);
    try {
      const raw = { params: { command_id }, body: { signal } };
      const { input, caller } = call.admit(visit, raw, { lasts: false });
      const quota = await rooms.rates.spend(caller.key_id);
      if (quota?.refusal) throw quota.refusal;
      await insisting(caller.signal, [], async () => handlers.commands.signal(input, caller));
    } catch (error) {
      await visit.settle(error);
      throw error;
    }
    if (monotonic() - (signalled.get(signal) ?? Number.NEGATIVE_INFINITY) < recordMs) return;
    signalled.set(signal, monotonic());
    await visit.settle();
  }

  return {
    exec,
    async followCommand(
      call: Call<never, FollowCommandResponse>,
      { command_id, stdout_offset, stderr_offset }: FollowCommandRequest__Output,
    ): Promise<void> {
      const last_event_id = `${stdout_offset}.${stderr_offset}`;
      const raw = { params: { command_id }, headers: { last_event_id } };
      const { input, caller } = call.admit(call.knock(following), raw);
      const from = offsetsIn(input.last_event_id);
      for await (const part of await commands.follow(input.command_id, from, caller.signal)) {
        await call.send(partOf(part));
      }
    },
  };
}

/** Tries until it is done, or the command has no more use for it: it has ended, or closed its input. */
async function insisting(
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

/** As the body of POST /commands. */
function bodyOf(start: ExecStart__Output) {
  const { machine_id, command, direct, args, cwd, env, user, timeout_ms, queue_for_ms } = start;
  // Counted before each of them is checked: a message has place for many thousands.
  if (Object.keys(env).length > mostVariables) {
    const issues = [{ path: 'env', message: `at most ${mostVariables} variables` }];
    throw new AppError('validation_failed', `body: env: at most ${mostVariables} variables`, { issues });
  }
  return {
    machine_id,
    command,
    ...(direct && { args }),
    ...(cwd !== undefined && { cwd }),
    ...(user !== undefined && { user }),
    ...(Object.keys(env).length > 0 && { env }),
    ...(timeout_ms > 0 && { timeout: timeout_ms }),
    ...(queue_for_ms > 0 && { queue_for: queue_for_ms }),
    input: true,
    wait: 0,
  };
}

const streamNames = { stdout: 'OUTPUT_STREAM_STDOUT', stderr: 'OUTPUT_STREAM_STDERR' } as const;

type Told = Awaited<ReturnType<Commands['follow']>> extends AsyncIterable<infer T> ? T : never;

function partOf(part: Told): Part {
  if ('end' in part) return { end: endOf(part.end) };
  const stream = streamNames[part.stream];
  if ('from' in part) return { gap: { stream, from: part.from, to: part.to } };
  return { output: { stream, offset: part.offset, data: part.data } };
}

function endOf({
  status,
  exit_code,
  signal,
  reason,
  duration,
}: Extract<Told, { end: unknown }>['end']): CommandEnd {
  return {
    status,
    ...(exit_code !== null && { exit_code }),
    ...(signal !== null && { signal }),
    ...(reason !== null && { reason }),
    ...(duration !== null && { duration_ms: Math.round(duration) }),
  };
}
