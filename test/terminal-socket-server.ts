// A WebSocket server with one fake session, whose messages the test sends and receives.
import { once } from 'node:events';
import { createServer, type IncomingMessage } from 'node:http';
import { connect, type Socket } from 'node:net';
import { onTestFinished } from 'vitest';
import { WebSocket } from 'ws';
import { createTrustedProxies } from '../broker/client-address.ts';
import { type Attachment, WebSocketUpgrades } from '../broker/http/terminal-websocket-upgrades.ts';
import type { ClientPort } from '../broker/sessions/terminal-client.ts';
import { AppError } from '../shared/errors.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { quiet } from './start-farhand.ts';

const session_id = 'sess_one';
export const path = `/api/v1/sessions/${session_id}/stream`;

/**
 * Starts a WebSocket server for one session, with tickets that are valid once. The test gets the server's side of each
 * client.
 */
export async function startTerminalServer(publicUrl = '') {
  const tickets = new Set(['one', 'two']);
  const left: string[] = [];
  const ports: ClientPort[] = [];
  let came = (_port: ClientPort): void => {};
  const attachment: Attachment = {
    attached: { session_id, client_id: 'cli_one' },
    serve: async (port) => {
      ports.push(port);
      came(port);
    },
    leave: () => void left.push('left'),
  };
  const redeem = (ticket: string) => (tickets.delete(ticket) ? attachment : undefined);
  const door = new WebSocketUpgrades({
    redeem,
    publicUrl: () => publicUrl,
    proxies: createTrustedProxies([]),
    log: quiet,
  });
  const shouldUpgradeCallback = (request: IncomingMessage) => door.admits(request);
  const server = createServer({ shouldUpgradeCallback }, (request, response) => {
    const refusal = door.refusal(request);
    if (refusal instanceof AppError) response.statusCode = refusal.status;
    response.end(String(refusal));
  });
  const sockets = new Set<Socket>();
  server.on('connection', (socket) => sockets.add(socket));
  server.on('upgrade', (request, socket, head) => door.take(request, socket, head));
  const port = await listenOnLoopback(server);
  return {
    port,
    ports,
    left,
    tickets,
    /** Resolves with the server's side of the next client. */
    arrival: () =>
      new Promise<ClientPort>((resolve) => {
        came = resolve;
      }),
    /** Connects a client. Resolves with both sides of the connection. */
    async enter(options = {}): Promise<{ client: WebSocket; port: ClientPort; closed: Promise<unknown[]> }> {
      const arrived = this.arrival();
      const client = new WebSocket(`ws://127.0.0.1:${port}${path}?ticket=one`, options);
      onTestFinished(() => client.terminate());
      const closed = once(client, 'close').then(([code, reason]) => [code, String(reason)]);
      await once(client, 'open');
      return { client, port: await arrived, closed };
    },
    /** From now on cuts requests that are silent for this long, as the broker does. */
    cutSilent: (ms: number) => void server.setTimeout(ms, (socket) => socket.destroy()),
    /** Resolves when every connection is closed on the server's side. */
    async empty(): Promise<void> {
      await Promise.all([...sockets].filter(({ closed }) => !closed).map((socket) => once(socket, 'close')));
      await new Promise((resolve) => setImmediate(resolve));
    },
    /** Cuts every connection. */
    cut(): void {
      for (const socket of sockets) socket.destroy();
    },
    /** Requests a WebSocket. Resolves with the HTTP status. */
    async status(params: { path?: string; headers?: Record<string, string | undefined>; method?: string }) {
      const headers = Object.entries({ ...handshake, Host: `127.0.0.1:${port}`, ...params.headers });
      const lines = headers
        .filter(([, value]) => value !== undefined)
        .map(([name, value]) => `${name}: ${value}`);
      const socket = connect(port, '127.0.0.1');
      onTestFinished(() => void socket.destroy());
      const line = `${params.method ?? 'GET'} ${params.path ?? `${path}?ticket=one`} HTTP/1.1`;
      socket.write([line, ...lines, '', ''].join('\r\n'));
      const [answer] = await once(socket, 'data');
      return Number(/^HTTP\/1\.1 (\d{3})/.exec(String(answer))?.[1]);
    },
  };
}

export const handshake = {
  Connection: 'Upgrade',
  Upgrade: 'websocket',
  'Sec-WebSocket-Version': '13',
  'Sec-WebSocket-Key': Buffer.alloc(16).toString('base64'),
};
