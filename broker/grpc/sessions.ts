// AttachSession: a gRPC stream as a client of a terminal.
import type { Caller, Input } from '../../shared/api/index.ts';
import { sessions as routes } from '../../shared/api/sessions.ts';
import { AppError } from '../../shared/errors.ts';
import { present } from '../../shared/rpc.ts';
import { type AccessServices, guardOf } from '../admission/authorize.ts';
import { type ClientPort, type Doing, doingOf, type Note, type Parting } from '../sessions/client.ts';
import type { Call, Received, Rpc, Sent } from './call.ts';

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

export function sessionRpcs(services: AccessServices & { sessions: Joining }) {
  const AttachSession: Rpc<'AttachSession', typeof routes.attach> = {
    guard: guardOf(routes.attach, services),
    first: 'open',
    raw: ({ session_id, mode, offset }) => ({
      params: { session_id },
      body: { mode: modes[mode], ...present({ offset }) },
    }),
    async run(call, { input, caller }) {
      const attachment = await services.sessions.join(input, caller);
      let parting: Parting | undefined;
      // The signal reports a client that is gone.
      const send = (message: Message): Promise<void> => call.send(message).catch(() => undefined);
      await attachment.serve({
        output: (bytes) => send({ output: bytes }),
        note: (note) => send(messageOf(note)),
        doings: doingsOf(call),
        gone: call.gone.signal,
        part(given) {
          parting ??= given;
        },
      });
      call.gone.signal.throwIfAborted();
      const { why = 'stopping', ...end } = parting ?? {};
      if (why !== 'ended') throw partings[why];
      await call.send({ end: present(end) });
      return undefined;
    },
  };
  return { AttachSession };
}

/** Why a client is let go, where its session goes on. */
const partings = {
  detached: new AppError('conflict', 'this client was detached; the session goes on'),
  forbidden: new AppError('forbidden', 'this key may no longer attach to this session'),
  fell_behind: new AppError(
    'range_not_satisfiable',
    'the next output for this client is no longer stored: attach again without an offset',
  ),
  stopping: new AppError('unavailable', 'the broker is stopping: attach again later'),
};

function messageOf(note: Note): Message {
  if (note.type === 'status') return { status: note.status };
  if (note.type === 'refused') return { refused: note.message };
  const size = { cols: note.cols, rows: note.rows };
  if (note.type === 'size') return { size };
  return { attached: { client_id: note.client_id, offset: note.offset, size } };
}

/** An invalid message ends the call. */
async function* doingsOf(call: Attaching): AsyncGenerator<Doing> {
  try {
    for await (const message of call.messages) yield doingIn(message);
  } catch (error) {
    call.gone.abort(error);
  }
}

/** As a WebSocket would have it. */
function doingIn({ message, input, size, signal }: Received<'AttachSession'>): Doing {
  if (message === 'input' && input) return { input };
  if (message === 'size') return doingOf({ type: 'resize', ...size });
  if (message === 'signal') return doingOf({ type: 'signal', signal });
  throw new AppError('invalid_request', 'after the first message comes input, size or signal');
}
