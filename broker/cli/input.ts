// All of standard input in one piece, for what takes it so: keys, secrets, the input of many machines.
import { UsageError } from '../../shared/errors.ts';

/** Text of at most so many bytes. */
export async function readInput(mostBytes: number, advice: string): Promise<string> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of process.stdin as AsyncIterable<Buffer>) {
    bytes += chunk.length;
    if (bytes > mostBytes) throw new UsageError(`standard input has more than ${mostBytes} bytes: ${advice}`);
    chunks.push(chunk);
  }
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Buffer.concat(chunks));
  } catch {
    throw new UsageError(`standard input is no UTF-8: ${advice}`);
  }
}
