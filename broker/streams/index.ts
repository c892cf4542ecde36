// farhand.client.v1.Streams beside the link: what programs in any language stream from the broker, and its health.
import type { Readable } from 'node:stream';
import type { Server, ServerDuplexStream, ServerWritableStream } from '@grpc/grpc-js';
import { HealthImplementation } from 'grpc-health-check';
import type { StreamsHandlers } from '../../proto/types/farhand/client/v1/Streams.ts';
import type { WriteFileResponse } from '../../proto/types/farhand/client/v1/WriteFileResponse.ts';
import { streamsService } from '../../shared/rpc.ts';
import { type Call, type CallRooms, type Calls, openCalls, type Surface } from './call.ts';
import { type CommandStreams, commandCalls } from './commands.ts';
import { eventCalls } from './events.ts';
import { fileCalls } from './files.ts';
import { type Joining, sessionCalls } from './sessions.ts';
import type { Refusal } from './status.ts';

export interface StreamsRooms extends CommandStreams, CallRooms {
  sessions: Joining;
  /** Longest wait for a client that holds up a transfer. */
  stalledMs: number;
}

export interface Streams {
  /** Adds the service to a server, before it takes calls; `proven` lets a connection stay that has shown a key. */
  serve(server: Server, proven: (peer: string) => void): void;
  /** Says that nothing is served any more, and ends every call. */
  stop(): void;
}

const served = ['', 'farhand.client.v1.Streams'];

export function openStreams(rooms: StreamsRooms): Streams {
  const health = new HealthImplementation(Object.fromEntries(served.map((name) => [name, 'SERVING'])));
  let calls: Calls | undefined;
  return {
    serve(server, proven) {
      calls = openCalls(rooms, proven);
      server.addService(streamsService, handlersOf(rooms, calls));
      health.addToServer(server);
    },
    stop() {
      for (const name of served) health.setStatus(name, 'NOT_SERVING');
      calls?.stop();
    },
  };
}

function handlersOf(rooms: StreamsRooms, calls: Calls): StreamsHandlers {
  const { exec, followCommand } = commandCalls(rooms);
  const { readFile, writeFile, watchFiles } = fileCalls(rooms);
  const { events } = eventCalls(rooms);
  const { attachSession } = sessionCalls(rooms);

  const duplex =
    <Q, R>(run: (call: Call<Q, R>) => Promise<void>) =>
    (stream: ServerDuplexStream<Q, R>): void =>
      void calls.serve(stream, { messages: stream, sink: stream }, run, ender(stream));
  const outgoing =
    <Q, R>(run: (call: Call<never, R>, request: Q) => Promise<void>) =>
    (stream: ServerWritableStream<Q, R>): void =>
      void calls.serve<never, R>(
        stream,
        { sink: stream },
        (call) => run(call, stream.request),
        ender(stream),
      );

  return {
    Exec: duplex(exec),
    FollowCommand: outgoing(followCommand),
    AttachSession: duplex(attachSession),
    ReadFile: outgoing(readFile),
    WatchFiles: outgoing(watchFiles),
    Events: outgoing(events),
    WriteFile(stream: Surface & Readable, reply) {
      let written: WriteFileResponse | undefined;
      const run = async (call: Parameters<typeof writeFile>[0]): Promise<void> => {
        written = await writeFile(call);
      };
      void calls.serve(stream, { messages: stream }, run, (refusal, trailers) => {
        if (refusal) reply(refusal);
        else reply(null, written, trailers);
      });
    },
  };
}

/** destroy() would leave the client's side open: a failure is told as an error with its status. */
function ender<Q, R>(stream: ServerDuplexStream<Q, R> | ServerWritableStream<Q, R>) {
  return (refusal: Refusal | undefined, trailers: Refusal['metadata']): void => {
    if (refusal) stream.emit('error', refusal);
    else stream.end(trailers);
  };
}
