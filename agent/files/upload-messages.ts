// Reads an upload: its open message, its chunks, and its commit. Without the commit nothing is changed.
import { createHash } from 'node:crypto';
import { AppError } from '../../shared/errors.ts';
import { unlessAborted } from '../../shared/stop-waiting-on-abort.ts';
import { type Bytes, toText } from './confine/parse-request-path.ts';

interface Message<Open, Commit> {
  open?: Open | null;
  chunk?: Buffer | null;
  commit?: Commit | null;
}

export type UploadMessages<Open, Commit> = AsyncIterable<Message<Open, Commit>>;

export class Upload<Open, Commit extends { sha256?: string }> implements Disposable {
  readonly open: Open;
  readonly #next: () => Promise<Message<Open, Commit> | undefined>;
  readonly #end: () => void;
  readonly #hash = createHash('sha256');
  #commit: Commit | undefined;

  private constructor(open: Open, next: () => Promise<Message<Open, Commit> | undefined>, end: () => void) {
    this.open = open;
    this.#next = next;
    this.#end = end;
  }

  static async begin<Open, Commit extends { sha256?: string }>(
    request: UploadMessages<Open, Commit>,
    signal: AbortSignal,
  ): Promise<Upload<Open, Commit>> {
    const messages = request[Symbol.asyncIterator]();
    const next = async (): Promise<Message<Open, Commit> | undefined> => {
      const message = await unlessAborted(signal, messages.next());
      return message.done ? undefined : message.value;
    };
    // return() is not awaited, because a request that hangs must not delay the response.
    const end = (): void => void messages.return?.().catch(() => undefined);
    try {
      const open = (await next())?.open;
      if (!open)
        throw new AppError('invalid_request', 'the first message of an upload must be an open message');
      return new Upload(open, next, end);
    } catch (error) {
      end();
      throw error;
    }
  }

  /** Yields all chunks. Throws if the request ends without a commit, or continues after the commit. */
  async *chunks(): AsyncGenerator<Buffer, void, void> {
    for (;;) {
      const message = await this.#next();
      if (!message) throw new AppError('invalid_request', 'the upload ended without a commit message');
      if (message.commit) {
        if (await this.#next())
          throw new AppError('invalid_request', 'no message may follow the commit message of an upload');
        this.#commit = message.commit;
        return;
      }
      if (!message.chunk)
        throw new AppError(
          'invalid_request',
          'after the open message of an upload only chunk or commit may follow',
        );
      this.#hash.update(message.chunk);
      if (message.chunk.length > 0) yield message.chunk;
    }
  }

  /**
   * Returns the commit message and the SHA-256 of all chunks. Throws validation_failed if the commit message contains
   * another SHA-256.
   */
  finish(path: Bytes): { commit: Commit; sha256: string } {
    const commit = this.#commit;
    if (!commit) throw new Error('finish() was called before all chunks of the upload were read');
    const sha256 = this.#hash.digest('hex');
    if (commit.sha256 === undefined || commit.sha256.toLowerCase() === sha256) return { commit, sha256 };
    const message = 'does not match the bytes that arrived; send them again';
    const details = { issues: [{ path: 'sha256', message }], sha256 };
    throw new AppError('validation_failed', `${toText(path)}: sha256 ${message}`, details);
  }

  [Symbol.dispose](): void {
    this.#end();
  }
}
