// The rpcs ReadFile, WriteFile, WatchFiles and Events: file contents, file changes and broker events as gRPC
// streams.
import { createHash } from 'node:crypto';
import type { WriteFileCommit__Output } from '../../proto/types/farhand/client/v1/WriteFileCommit.ts';
import { present } from '../../shared/agent-rpcs.ts';
import { api } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import { guardOf } from '../request-checks/authorize-and-perform.ts';
import { type Call, partsOf, type Rpc, type StreamsServices } from './incoming-call.ts';

const { download, put, watch } = api.files;
const { stream: follow } = api.events;

/**
 * Creates the rpcs for files. A client that stops reading or sending is disconnected, because a machine allows only a
 * few transfers at once.
 */
export function fileRpcs(services: StreamsServices) {
  const { files } = services.handlers;

  const ReadFile: Rpc<'ReadFile', typeof download> = {
    guard: guardOf(download, services),
    async run(call, { input, caller }) {
      const { bytes, ...head } = await files.download(input, caller);
      await call.send({ head: headOf(head, caller.headers) });
      let sent = 0;
      for await (const chunk of bytes ?? []) {
        sent += chunk.length;
        await call.unlessStalled(call.send({ chunk }));
      }
      const { length = sent } = head;
      if (sent === length) return undefined;
      throw new AppError('machine_error', `the machine sent only ${sent} of ${length} bytes: try again`, {
        sent,
        length,
      });
    },
  };

  const WriteFile: Rpc<'WriteFile', typeof put> = {
    guard: guardOf(put, services),
    first: 'open',
    async run(call, { input, caller }) {
      const content = { chunks: chunksOf(call), fields: () => undefined };
      const { path_encoding = '', ...written } = await files.put({ ...input, content }, caller);
      return { ...written, path_encoding };
    },
  };

  const WatchFiles: Rpc<'WatchFiles', typeof watch> = {
    guard: guardOf(watch, services),
    async run(call, { input, caller }) {
      for await (const { event, data } of await files.watch(input, caller)) {
        const { kind, path, path_encoding = '', type = '' } = data;
        const change = kind ?? (event === 'overflow' ? event : '');
        await call.unlessStalled(call.send({ change, path, path_encoding, type }));
      }
      return undefined;
    },
  };
  return { ReadFile, WriteFile, WatchFiles };
}

export function eventRpcs(services: StreamsServices) {
  const Events: Rpc<'Events', typeof follow> = {
    guard: guardOf(follow, services),
    raw: ({ after_id, ...message }) => partsOf(follow, { ...message, last_event_id: after_id }),
    async run(call, { input, caller }) {
      for await (const { data } of await services.handlers.events.stream(input, caller)) {
        await call.send({ ...data, data: JSON.stringify(data.data) });
      }
      return undefined;
    },
  };
  return { Events };
}

/** Returns the head of a file: the values that HTTP sends as response headers. */
function headOf({ length }: { length?: number | undefined }, headers: Headers) {
  const modified = Date.parse(headers.get('Last-Modified') ?? '');
  return {
    etag: headers.get('ETag') ?? '',
    ...present({ length }),
    ...(!Number.isNaN(modified) && { modified_at_ms: modified }),
  };
}

/**
 * Yields the chunks before the commit. Throws if the commit is missing or its checksum is wrong; then no file
 * is changed.
 */
async function* chunksOf(call: Call<'WriteFile'>): AsyncGenerator<Uint8Array> {
  const hash = createHash('sha256');
  for (;;) {
    const next = await call.unlessStalled(call.messages.next());
    if (next.done) break;
    const { message, chunk, commit } = next.value;
    if (commit) return assertChecksum(commit, hash.digest('hex'));
    if (message !== 'chunk')
      throw new AppError(
        'invalid_request',
        'every message after the first must have the field chunk or commit',
      );
    if (!chunk || chunk.length === 0) continue;
    hash.update(chunk);
    yield chunk;
  }
  throw new AppError(
    'invalid_request',
    'the call ended without a commit, so the file was not changed: send all chunks, then the commit',
  );
}

function assertChecksum(commit: WriteFileCommit__Output, sha256: string): void {
  if (commit.sha256 === undefined || commit.sha256.toLowerCase() === sha256) return;
  const issue = {
    path: 'sha256',
    message: 'differs from the SHA-256 of the bytes that arrived: upload the file again',
  };
  const details = { issues: [issue], sha256 };
  throw new AppError('validation_failed', `commit: ${issue.path}: ${issue.message}`, details);
}
