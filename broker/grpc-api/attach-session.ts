// The rpc AttachSession: attaches a gRPC stream to a terminal session, as one of its clients.

import { present } from '../../shared/agent-rpcs.ts';
import { sessions as routes } from '../../shared/api/terminal-sessions.ts';
import { AppError } from '../../shared/errors.ts';
import { guardOf } from '../request-checks/authorize-and-perform.ts';
import { type Action, actionOf, type CloseReason, type Notice } from '../sessions/terminal-client.ts';
import type { Call, Received, Rpc, Sent, StreamsServices } from './incoming-call.ts';

type Message = Sent<'AttachSession'>;

const modes = {
  ATTACH_MODE_UNSPECIFIED: 'operator',
  ATTACH_MODE_OPERATOR: 'operator',
  ATTACH_MODE_OBSERVER: 'observer',
} as const;

export function sessionRpcs(services: StreamsServices) {
  const AttachSession: Rpc<'AttachSession', typeof routes.attach> = {
    guard: guardOf(routes.attach, services),
    first: 'open',
    raw: ({ session_id, mode, offset }) => ({
      params: { session_id },
      body: { mode: modes[mode], ...present({ offset }) },
    }),
    async run(call, { input, caller }) {
      const attachment = await services.sessions.join(input, caller);
      let closeReason: CloseReason | undefined;
      // A failed send is ignored, because the signal reports that the client has disconnected.
      const send = (message: Message): Promise<void> => call.send(message).catch(() => undefined);
      await attachment.serve({
        output: (bytes) => send({ output: bytes }),
        notify: (notice) => send(messageOf(notice)),
        actions: actionsOf(call),
        gone: call.gone.signal,
        close(given) {
          closeReason ??= given;
        },
      });
      call.gone.signal.throwIfAborted();
      const { why = 'stopping', ...end } = closeReason ?? {};
      if (why !== 'ended') throw closeErrors[why];
      await call.send({ end: present(end) });
      return undefined;
    },
  };
  return { AttachSession };
}

/** Errors for a client that is detached while its session continues. */
const closeErrors = {
  detached: new AppError('conflict', 'this client was detached; the session goes on'),
  forbidden: new AppError('forbidden', 'this key is no longer allowed to attach to this session'),
  fell_behind: new AppError(
    'range_not_satisfiable',
    'the output that this client needs next is not stored: attach again without offset',
  ),
  stopping: new AppError('unavailable', 'the broker is stopping: attach again later'),
};

function messageOf(notice: Notice): Message {
  if (notice.type === 'status') return { status: notice.status };
  if (notice.type === 'refused') return { refused: notice.message };
  const size = { cols: notice.cols, rows: notice.rows };
  if (notice.type === 'size') return { size };
  return { attached: { client_id: notice.client_id, offset: notice.offset, size } };
}

/** The client's actions. An invalid message ends the call. */
async function* actionsOf(call: Call<'AttachSession'>): AsyncGenerator<Action> {
  try {
    for await (const message of call.messages) yield actionIn(message);
  } catch (error) {
    call.gone.abort(error);
  }
}

/** Converts a gRPC message to an action, as actionOf() does with WebSocket messages. */
function actionIn({ message, input, size, signal }: Received<'AttachSession'>): Action {
  if (message === 'input' && input) return { input };
  if (message === 'size') return actionOf({ type: 'resize', ...size });
  if (message === 'signal') return actionOf({ type: 'signal', signal });
  throw new AppError(
    'invalid_request',
    'every message after the first must have the field input, size or signal',
  );
}
