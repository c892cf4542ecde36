// The output of a command as text, updated while it arrives. Both streams are in one list, in the order of their
// arrival.
import { client, FarhandError } from '../api-client.ts';
import { soon } from '../timers.ts';
import { reasonText } from './reason-text.ts';

interface OutputPart {
  id: number;
  stream: 'stdout' | 'stderr';
  text: string;
  /** True if this part stands for bytes that are not stored. */
  gap?: boolean;
}

/** Maximum number of characters that the page of a command draws. The whole output can be downloaded. */
const mostCharacters = 1024 * 1024;

// biome-ignore lint/suspicious/noControlCharactersInRegex: escape sequences are what is removed
const escapes = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\-_])/g;
// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is removed
const controls = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g;

/** Returns the text without colours and other control sequences of terminals. */
const readable = (text: string): string =>
  text.replaceAll(escapes, '').replaceAll('\r\n', '\n').replaceAll(controls, '');

/** Returns why a command has no outcome, or else the last line of its output. Standard error comes first. */
export function lastLine(of: { stdout: string; stderr: string; reason: string | null }): string {
  const text = of.reason === null ? readable(of.stderr.trim() || of.stdout.trim()) : reasonText(of.reason);
  return text.slice(text.lastIndexOf('\n') + 1);
}

export class Output {
  parts: readonly OutputPart[] = [];
  /** True if the beginning is left out because the output is too long. */
  cut = false;
  readonly #most: number;
  #length = 0;
  #nextId = 0;
  readonly #decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };

  /** `most`: maximum number of characters to store. If there are more, the oldest ones are dropped. */
  constructor(most = mostCharacters) {
    this.#most = most;
  }

  /** Adds a piece of output. Consecutive pieces of one stream become one part. */
  add(stream: OutputPart['stream'], data: string, encoding: 'utf-8' | 'base64'): void {
    const bytes =
      encoding === 'base64' ? Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)) : undefined;
    const text = readable(bytes ? this.#decoders[stream].decode(bytes, { stream: true }) : data);
    const last = this.parts.at(-1);
    if (last?.stream === stream && last.text.length < Math.min(16_384, this.#most / 4)) {
      this.parts = [...this.parts.slice(0, -1), { ...last, text: last.text + text }];
    } else this.#push({ stream, text });
    this.#length += text.length;
    while (this.#length > this.#most && this.parts.length > 1) {
      this.#length -= this.parts[0]?.text.length ?? 0;
      this.parts = this.parts.slice(1);
      this.cut = true;
    }
  }

  addGap(stream: OutputPart['stream']): void {
    this.#push({ stream, text: '', gap: true });
  }

  #push(part: Omit<OutputPart, 'id'>): void {
    this.#nextId += 1;
    this.parts = [...this.parts, { id: this.#nextId, ...part }];
  }
}

/** Milliseconds between two drawings while output arrives. */
const frameMs = 16;

/** Follows a command until its end. Calls `changed` at most once per frame. */
export async function followOutput(
  id: string,
  output: Output,
  signal: AbortSignal,
  changed: () => void,
): Promise<void> {
  const draw = soon(frameMs, changed);
  try {
    for await (const { data } of client.commands.stream({ command_id: id }, { signal })) {
      if ('data' in data) output.add(data.stream, data.data, data.encoding);
      else if ('from' in data) output.addGap(data.stream);
      draw();
    }
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof FarhandError && error.code === 'range_not_satisfiable')) throw error;
  }
}

export function OutputText({ parts }: { parts: readonly OutputPart[] }) {
  return (
    <pre>
      {parts.map(({ id, stream, text, gap }) => (
        <span key={id} class={stream}>
          {gap ? '[output that is not stored]\n' : text}
        </span>
      ))}
    </pre>
  );
}
