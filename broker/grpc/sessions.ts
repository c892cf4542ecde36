// AttachSession: a client of a terminal over gRPC, as a port that sessions serve.
import type { AttachOpen__Output } from '../../proto/types/farhand/client/v1/AttachOpen.ts';
import type { Caller, Input } from '../../shared/api/index.ts';
import { cols, sessions as routes, rows } from '../../shared/api/sessions.ts';
import { AppError } from '../../shared/errors.ts';
import { isSignal } from '../../shared/signals.ts';
import { type AccessRooms, guardOf } from '../admission/authorize.ts';
import type { ClientPort, Doing, Note, Parting } from '../sessions/client.ts';
import { type Call, present, type Received, type Rpc, type Sent } from './call.ts';

/** What this needs of sessions. */
export interface Joining {
  join(
    input: Input<typeof routes.attach>,
    caller: Caller,
  ): Promise<{ serve(port: ClientPort): Promise<void> }>;
}

type Attaching = Call<'AttachSession'>;
type Message = Sent<'AttachSession'>;

const modes = {
  ATTACH_MODE_UNSPECIFIED: 'operator',
  ATTACH_MODE_OPERATOR: 'operator',
  ATTACH_MODE_OBSERVER: 'observer',
} as const;

export function sessionRpcs(services: AccessRooms & { sessions: Joining }) {
  const AttachSession: Rpc<'AttachSession', typeof routes.attach, AttachOpen__Output> = {
    guard: guardOf(routes.attach, services),
    first: { name: 'an open', of: (message) => message.open },
    raw: ({ session_id, mode, offset }) => ({
      params: { session_id },
      body: { mode: modes[mode], ...present({ offset }) },
    }),
    async run(call, { input, caller }) {
      const attachment = await services.sessions.join(input, caller);
      const { port, parted } = portOf(call);
      await attachment.serve(port);
      await parted();
      return undefined;
    },
  };
  return { AttachSession };
}

/** The call as a client's port; `parted` tells the client why it was let go, and resolves where that is no failure. */
function portOf(call: Attaching): { port: ClientPort; parted(): Promise<void> } {
  let parting: Parting | undefined;
  const tell = (message: Message): Promise<void> =>
    // Whoever is gone is told of by the signal.
    call.send(message).catch(() => undefined);
  return {
    port: {
      output: (bytes) => tell({ output: bytes }),
      note: (note) => tell(messageOf(note)),
      doings: doingsOf(call),
      gone: call.gone.signal,
      part(given) {
        parting ??= given;
      },
    },
    async parted() {
      call.gone.signal.throwIfAborted();
      if (parting?.why !== 'ended') throw partingError(parting?.why);
      const { exit_code, signal, reason } = parting;
      await call.send({ end: present({ exit_code, signal, reason }) });
    },
  };
}

function partingError(why: Exclude<Parting['why'], 'ended'> | undefined): AppError {
  if (why === 'detached') return new AppError('conflict', 'this client was detached; the session goes on');
  if (why === 'forbidden') return new AppError('forbidden', 'this key may no longer attach to this session');
  if (why === 'fell_behind')
    return new AppError(
      'range_not_satisfiable',
      'what comes next for this client is not kept: attach again without an offset',
    );
  return new AppError('unavailable', 'the broker stops: attach again');
}

function messageOf(note: Note): Message {
  if (note.type === 'status') return { status: note.status };
  if (note.type === 'refused') return { refused: note.message };
  const size = { cols: note.cols, rows: note.rows };
  if (note.type === 'size') return { size };
  return { attached: { client_id: note.client_id, offset: note.offset, size } };
}

/** One of a form that nobody can have ends the call. */
async function* doingsOf(call: Attaching): AsyncGenerator<Doing> {
  try {
    for await (const message of call.messages) yield doingOf(message);
  } catch (error) {
    call.gone.abort(error);
  }
}

function doingOf({ message, input, size, signal }: Received<'AttachSession'>): Doing {
  if (message === 'input' && input) return { input };
  if (message === 'size' && size)
    return { size: { cols: demand(cols, size, 'cols'), rows: demand(rows, size, 'rows') } };
  if (message === 'signal' && signal !== undefined && isSignal(signal)) return { signal };
  if (message === 'signal') throw invalid('signal', 'is none that may be sent');
  throw new AppError('invalid_request', 'after the first message comes input, size or signal');
}

function demand(schema: typeof cols, size: { cols: number; rows: number }, name: 'cols' | 'rows'): number {
  const parsed = schema.safeParse(size[name]);
  if (parsed.success) return parsed.data;
  throw invalid(name, 'must be from 1 to 1000');
}

function invalid(path: string, message: string): AppError {
  return new AppError('validation_failed', `message: ${path}: ${message}`, { issues: [{ path, message }] });
}
