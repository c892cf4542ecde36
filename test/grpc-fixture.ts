// Helpers for tests of the gRPC API: a client, errors as values, and requests that the test sends one by one.
import { onTestFinished } from 'vitest';
import { connect, FarhandError, type Streams } from '../shared/grpc-api-client.ts';
import { call, type TestSystem } from './start-farhand.ts';

/** Fetches the certificate of the broker's authority, as a client does. */
export async function caOf({ url, key }: Pick<TestSystem, 'url' | 'key'>): Promise<string> {
  return (await call(`${url}/api/v1/ca.pem`, 'GET', { key })).body;
}

/** Creates a client of a broker. Closes it at the end of the test. */
export async function streamsOf(
  system: TestSystem,
  apiKey = system.key,
  address = system.grpc,
): Promise<Streams> {
  const client = connect({ address, ca: await caOf(system), apiKey });
  onTestFinished(() => client.close());
  return client;
}

/** Returns all messages of a stream. */
export const all = <T>(messages: AsyncIterable<T>): Promise<T[]> => Array.fromAsync(messages);

/** Resolves with the error of a refused call, over gRPC or of the SDK. Rejects if the call is not refused. */
export async function refusalOf(work: PromiseLike<unknown> | AsyncIterable<unknown>): Promise<FarhandError> {
  try {
    await ('then' in work ? work : Array.fromAsync(work));
  } catch (error) {
    if (error instanceof FarhandError) return error;
    throw error;
  }
  throw new Error('it was not refused');
}

/** A stream of requests. It begins with the requests in `first`; send() adds more, and end() ends it. */
export function line<T>(...first: T[]) {
  const waiting: T[] = [...first];
  let ended = false;
  let wake = (): void => {};
  async function* requests(): AsyncGenerator<T> {
    for (;;) {
      const next = waiting.shift();
      if (next !== undefined) yield next;
      else if (ended) return;
      else {
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
      }
    }
  }
  return {
    requests: requests(),
    send(request: T): void {
      waiting.push(request);
      wake();
    },
    end(): void {
      ended = true;
      wake();
    },
  };
}

/** Collects output, end and gaps of a command. Throws if a byte was sent twice, or is missing without a gap. */
export function hearing() {
  const heard = { stdout: Buffer.alloc(0), stderr: Buffer.alloc(0) };
  return {
    heard,
    take(output: { stream: string; offset: number; data: Buffer } | null | undefined): void {
      if (!output) return;
      const stream = output.stream === 'OUTPUT_STREAM_STDERR' ? 'stderr' : 'stdout';
      if (output.offset !== heard[stream].length) throw new Error(`${stream}: ${output.offset} came`);
      heard[stream] = Buffer.concat([heard[stream], output.data]);
    },
  };
}
