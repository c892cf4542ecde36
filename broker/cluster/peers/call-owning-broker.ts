// Lets handlers call other brokers, for requests about machines that other brokers own.
import { json } from 'node:stream/consumers';
import { status as grpcStatus, Metadata, type StatusObject } from '@grpc/grpc-js';
import { type CallOptions, drained, fileWriterService } from '../../../shared/agent-rpcs.ts';
import type { Caller } from '../../../shared/api/route-table.ts';
import { eventsOf } from '../../../shared/sdk/parse-lines-and-sse.ts';
import { errorOf } from '../../grpc-api/forward-call-to-owner.ts';
import { unanswered } from './forward-http-to-peer.ts';
import { clientOf } from './forwarded-client-header.ts';
import { type Clients, machineHeader, type PeerCalls } from './grpc-calls-to-peers.ts';
import type { FileWriter, OtherBrokers, Owners, Peer } from './owner-interfaces.ts';

export function createOtherBrokers(owners: Owners, { http, grpc }: Clients): OtherBrokers {
  return {
    ownerElsewhere: (machineId) => owners.ownerElsewhere(machineId),
    async get(peer, path, caller) {
      // The cast is safe: every successful answer of a broker has the field `data`.
      return ((await json(await http.get(peer, path, caller))) as { data: unknown }).data;
    },
    async *events(peer, path, caller) {
      const answer = await http.get(peer, path, caller);
      try {
        yield* eventsOf(answer);
      } catch (error) {
        throw unanswered(peer, error);
      } finally {
        answer.destroy();
      }
    },
    writerOn(machineId, caller) {
      const peer = owners.ownerElsewhere(machineId);
      if (!peer) return undefined;
      const about = { peer, machineId, caller };
      const writer: Record<keyof FileWriter, unknown> = {
        writeFile: (messages: AsyncIterable<object>, options: CallOptions) =>
          write(grpc, 'writeFile', about, messages, options),
        writeArchive: (messages: AsyncIterable<object>, options: CallOptions) =>
          write(grpc, 'writeArchive', about, messages, options),
      };
      // The cast is safe: the messages are encoded and decoded as those of the rpc with the same name.
      return writer as unknown as FileWriter;
    },
  };
}

/** Calls an rpc that writes files. Throws the other broker's error, or unavailable if that broker does not answer. */
async function write(
  grpc: PeerCalls,
  rpc: keyof FileWriter,
  { peer, machineId, caller }: { peer: Peer; machineId: string; caller: Caller },
  messages: AsyncIterable<object>,
  { signal }: CallOptions,
): Promise<object> {
  const headers = new Metadata();
  headers.set(machineHeader, machineId);
  const method = fileWriterService[rpc];
  const about = { client: clientOf(caller), requestId: caller.request_id };
  const call = grpc.call(peer, method, headers, about);
  const cancel = (): void => call.cancel();
  signal?.addEventListener('abort', cancel, { once: true });
  // An error needs no handling here, because the event `status` reports it too. But without this listener, the error
  // would end the process.
  call.on('error', () => undefined);
  const answers: Buffer[] = [];
  call.on('data', (answer: Buffer) => answers.push(answer));
  const ended = new Promise<StatusObject>((resolve) => call.once('status', resolve));
  const over = new AbortController();
  void ended.then(() => over.abort());
  try {
    for await (const message of messages) {
      over.signal.throwIfAborted();
      if (!call.write(message)) await drained(call, over.signal);
    }
    call.end();
  } catch (error) {
    // If the other broker has ended the call (`over`), `error` is only a consequence and is ignored. The call's status
    // has the reason for the end, and errorOf() below reports it.
    if (!over.signal.aborted) {
      cancel();
      throw error;
    }
  } finally {
    signal?.removeEventListener('abort', cancel);
  }
  const status = await ended;
  signal?.throwIfAborted();
  const [answer] = answers;
  if (status.code !== grpcStatus.OK || !answer) throw errorOf(status);
  return method.responseDeserialize(answer);
}
