// The SDK's terminal with the broker's WebSocket server, as programs and pages use it.
import { once } from 'node:events';
import { Terminal as Screen } from '@xterm/headless';
import { expect, onTestFinished, test } from 'vitest';
import { createTransport } from '../broker/cli/pinned-transport.ts';
import type { ClientPort, CloseReason, Notice } from '../broker/sessions/terminal-client.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { openTerminal, type Terminal, type TerminalNote } from '../shared/sdk/terminal.ts';
import { takeFirst } from './take-first.ts';
import { startProxy } from './tcp-proxy.ts';
import { path, startTerminalServer } from './terminal-socket-server.ts';

const ready = { type: 'ready', client_id: 'cli_one', offset: 100, cols: 80, rows: 24 } as const;

/** A terminal and the broker's side of it. */
async function attach(
  first: Notice = ready,
): Promise<{ terminal: Terminal; port: ClientPort; notes: TerminalNote[] }> {
  const door = await startTerminalServer();
  const notes: TerminalNote[] = [];
  const arrival = door.arrival();
  const opening = openTerminal(new WebSocket(`ws://127.0.0.1:${door.port}${path}?ticket=one`), {
    onNote: (note) => notes.push(note),
  });
  const port = await arrival;
  void port.notify(first);
  const terminal = await opening;
  onTestFinished(() => terminal.detach());
  return { terminal, port, notes };
}

// ---- Failures

test('a terminal that cannot be opened rejects with the next step, for a used ticket and an unreachable broker', async () => {
  const door = await startTerminalServer();
  for (const url of [`ws://127.0.0.1:${door.port}${path}?ticket=wrong`, 'ws://127.0.0.1:1/']) {
    await expect(openTerminal(new WebSocket(url), {})).rejects.toThrow(/cannot be opened: .*used once/);
  }
});

test('a terminal that is closed before it is ready rejects with the reason, which is also the cause of the error', async () => {
  const door = await startTerminalServer();
  const arrival = door.arrival();
  const opening = openTerminal(new WebSocket(`ws://127.0.0.1:${door.port}${path}?ticket=one`), {});
  void arrival.then((port) => port.close({ why: 'forbidden' }));
  await expect(opening).rejects.toMatchObject({
    message: 'the terminal cannot be opened: forbidden',
    cause: { why: 'forbidden' },
  });
});

test('an aborted signal detaches, before it is ready and later', async () => {
  const door = await startTerminalServer();
  const url = `ws://127.0.0.1:${door.port}${path}`;
  const aborted = openTerminal(new WebSocket(`${url}?ticket=two`), { signal: AbortSignal.abort() });
  await expect(aborted).rejects.toThrow('detached');
  const stop = new AbortController();
  const arrival = door.arrival();
  const opening = openTerminal(new WebSocket(`${url}?ticket=one`), { signal: stop.signal });
  const port = await arrival;
  void port.notify(ready);
  const terminal = await opening;
  stop.abort();
  expect(await terminal.ended).toEqual({ why: 'detached' });
});

test('detaching over a connection that no longer answers ends the terminal at once', {
  timeout: 10_000,
}, async () => {
  const door = await startTerminalServer();
  const proxy = await startProxy(`127.0.0.1:${door.port}`);
  const arrival = door.arrival();
  const opening = openTerminal(new WebSocket(`ws://${proxy.address}${path}?ticket=one`), {});
  void (await arrival).notify(ready);
  const terminal = await opening;
  proxy.stall();
  terminal.detach();
  for await (const bytes of terminal.output) expect(bytes).toBe('no output');
  expect(await terminal.ended).toEqual({ why: 'detached' });
});

test('input that is written before detaching arrives, although the command line closes its connections at once', async () => {
  const door = await startTerminalServer();
  const { options, close } = createTransport({});
  const arrival = door.arrival();
  const opening = openTerminal(options.webSocket(`ws://127.0.0.1:${door.port}${path}?ticket=one`));
  const port = await arrival;
  void port.notify(ready);
  const terminal = await opening;
  // More than the network stores while the input is not read.
  const input = Buffer.alloc(16 * 1024 * 1024);
  void terminal.write(input);
  terminal.detach();
  await close();
  let bytes = 0;
  for await (const action of port.actions) if ('input' in action) bytes += action.input.length;
  expect(bytes).toBe(input.length);
});

test('a broken connection ends the terminal as lost, and its output as well', async () => {
  const door = await startTerminalServer();
  const arrival = door.arrival();
  const opening = openTerminal(new WebSocket(`ws://127.0.0.1:${door.port}${path}?ticket=one`), {});
  const port = await arrival;
  void port.notify(ready);
  const terminal = await opening;
  door.cut();
  expect(await terminal.ended).toMatchObject({ why: 'lost' });
  for await (const bytes of terminal.output) expect(bytes).toBe('no output');
  // Methods of an ended terminal do nothing.
  terminal.resize(1, 1);
  terminal.signal('SIGINT');
  await terminal.write('x');
});

test('without a window, over 16 MiB of unread output ends the terminal; the buffered output can be read, with the offset to continue at', async () => {
  const { terminal, port } = await attach();
  const piece = Buffer.alloc(1024 * 1024, 'z');
  for (let count = 0; count < 17; count += 1) await port.output(piece);
  expect(await terminal.ended).toEqual({ why: 'fell_behind' });
  let got = 0;
  for await (const bytes of terminal.output) got += bytes.length;
  expect([got, terminal.offset]).toEqual([16 * piece.length, 100 + 16 * piece.length]);
});

test('a broker that sends a window holds back unread output, and all of it arrives as it is read', async () => {
  const { terminal, port } = await attach({ ...ready, window: 64 * 1024 });
  const piece = Buffer.alloc(64 * 1024, 'z');
  const actions = port.actions[Symbol.asyncIterator]();
  /** Resolves when the broker has received everything that the terminal has sent so far. */
  const passed = async (): Promise<void> => {
    terminal.resize(80, 24);
    await actions.next();
  };
  await passed();
  let given = 0;
  const giving = (async () => {
    for (; given < 400; given += 1) await port.output(piece);
    port.close({ why: 'detached' });
  })();
  await passed();
  expect(given).toBe(0);
  let got = 0;
  for await (const bytes of terminal.output) got += bytes.length;
  await giving;
  expect(got).toBe(400 * piece.length);
});

// ---- The end of a terminal

test.each<CloseReason>([
  { why: 'ended', exit_code: 130, signal: 'SIGINT', reason: null },
  { why: 'detached' },
  { why: 'forbidden' },
  { why: 'fell_behind' },
  { why: 'stopping' },
])('it ends with the reason that the broker gives: %o', async (closeReason) => {
  const { terminal, port } = await attach();
  await port.output(Buffer.from('last words'));
  port.close(closeReason);
  const words: string[] = [];
  for await (const bytes of terminal.output) words.push(Buffer.from(bytes).toString());
  expect(words).toEqual(['last words']);
  expect(await terminal.ended).toEqual(closeReason);
});

test('detaching closes the connection, and the session detaches its client', async () => {
  const { terminal, port } = await attach();
  const gone = once(port.gone, 'abort');
  terminal.detach();
  await gone;
  expect(await terminal.ended).toEqual({ why: 'detached' });
});

// ---- The address of the WebSocket

test('the WebSocket is opened at the address that the client uses for the broker, with the ticket of the attach', async () => {
  const door = await startTerminalServer();
  const asked: string[] = [];
  const webSocket = (url: string): WebSocket => {
    asked.push(url);
    return new WebSocket(`ws://127.0.0.1:${door.port}${path}?ticket=wrong`);
  };
  const stream_url = 'wss://public.example.org/api/v1/sessions/sess_one/stream?ticket=a%2Fb';
  for (const baseUrl of ['https://farhand.example.org/behind/', 'http://127.0.0.1:8420']) {
    const client = new Farhand({ baseUrl, webSocket });
    await expect(client.sessions.terminal({ session_id: 'sess_one', stream_url })).rejects.toThrow(
      'cannot be opened',
    );
  }
  expect(asked).toEqual([
    'wss://farhand.example.org/behind/api/v1/sessions/sess_one/stream?ticket=a%2Fb',
    'ws://127.0.0.1:8420/api/v1/sessions/sess_one/stream?ticket=a%2Fb',
  ]);
});

// ---- Messages

test('input, sizes and signals arrive in order, however long the input is', async () => {
  const { terminal, port } = await attach();
  const long = '漢'.repeat(100_000);
  void terminal.write(long);
  void terminal.write(new Uint8Array([3]));
  terminal.resize(132, 43);
  terminal.signal('SIGTERM');
  const actions = await takeFirst(8, port.actions);
  const typed = Buffer.concat(actions.flatMap((action) => ('input' in action ? [action.input] : [])));
  expect(typed.equals(Buffer.from(`${long}\x03`))).toBe(true);
  expect(actions.slice(-2)).toEqual([{ size: { cols: 132, rows: 43 } }, { signal: 'SIGTERM' }]);
});

test('notices are passed on, and the offset is the last offset of the broker plus the bytes read since', async () => {
  const { terminal, port, notes } = await attach();
  expect([terminal.client_id, terminal.cols, terminal.rows, terminal.offset]).toEqual([
    'cli_one',
    80,
    24,
    100,
  ]);
  await port.output(Buffer.from('12345'));
  void port.notify({ type: 'status', status: 'GRACE_PERIOD' });
  void port.notify({ type: 'ready', client_id: 'cli_one', offset: 500, cols: 80, rows: 24 });
  await port.output(Buffer.from('678'));
  port.close({ why: 'detached' });
  await terminal.ended;
  const offsets: number[] = [];
  for await (const _ of terminal.output) offsets.push(terminal.offset);
  expect(offsets).toEqual([105, 503]);
  expect(notes.map(({ type }) => type)).toEqual(['ready', 'status', 'ready']);
});

test('a few lines connect a terminal to xterm.js, including characters split over messages', async () => {
  const { terminal, port } = await attach();
  const screen = new Screen({ cols: terminal.cols, rows: terminal.rows, allowProposedApi: true });
  onTestFinished(() => screen.dispose());
  screen.onData((data) => void terminal.write(data));
  screen.onResize(({ cols, rows }) => terminal.resize(cols, rows));
  const text = Buffer.from('\x1b[31mgrün\x1b[0m 漢字 ✓');
  for (const byte of text) await port.output(Buffer.from([byte]));
  // The program asks for the position of the cursor, and xterm.js answers.
  await port.output(Buffer.from('\x1b[6n'));
  port.close({ why: 'detached' });
  for await (const bytes of terminal.output)
    await new Promise<void>((resolve) => screen.write(bytes, resolve));
  expect(screen.buffer.active.getLine(0)?.translateToString(true)).toBe('grün 漢字 ✓');
});

test('messages of xterm.js arrive: its answers to queries and a new size', async () => {
  const { terminal, port } = await attach();
  const screen = new Screen({ cols: 80, rows: 24, allowProposedApi: true });
  onTestFinished(() => screen.dispose());
  screen.onData((data) => void terminal.write(data));
  screen.onResize(({ cols, rows }) => terminal.resize(cols, rows));
  screen.resize(100, 30);
  screen.write('ab\x1b[6n');
  expect(await takeFirst(2, port.actions)).toEqual([
    { size: { cols: 100, rows: 30 } },
    { input: Buffer.from('\x1b[1;3R') },
  ]);
});
