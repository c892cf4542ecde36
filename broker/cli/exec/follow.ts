// Follows one command to its end: every byte of both outputs once; the SDK goes on over connections that break.
import { StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';

export type OutputStream = 'stdout' | 'stderr';
type Told = ReturnType<Farhand['commands']['stream']> extends AsyncIterable<{ data: infer D }> ? D : never;
export type End = Extract<Told, { status: unknown }>;

export interface Hearer {
  output(stream: OutputStream, bytes: Uint8Array): Promise<void> | void;
  /** So many bytes went before they could be had. */
  gap(stream: OutputStream, count: number): void;
}

export async function follow(client: Farhand, command_id: string, hearer: Hearer): Promise<End> {
  for await (const { data } of client.commands.stream({ command_id })) {
    if ('status' in data) return data;
    if ('from' in data) hearer.gap(data.stream, data.to - data.from);
    else await hearer.output(data.stream, Buffer.from(data.data, data.encoding));
  }
  throw new StartError(`the output of ${command_id} ended before the command did`, 1);
}
