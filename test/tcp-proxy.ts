// A TCP proxy, mostly between agent and broker, that can delay, stall and cut connections.
import { connect, createServer, type Socket } from 'node:net';
import { atEnd } from './close-after-tests.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';

export interface Proxy {
  address: string;
  /** Holds back all bytes, in both directions, until resume(). */
  stall(): void;
  resume(): void;
  /** Holds back all further bytes from the target, on the connections that are open now. */
  holdAnswers(): void;
  /** Cuts every connection. New ones are accepted. */
  cut(): void;
  /** Refuses new connections until allow(). Open connections are not cut. */
  refuse(): void;
  /** Cuts every connection, and refuses new ones until allow(). */
  forbid(): void;
  allow(): void;
  /** From now on forwards new connections to this HOST:PORT. Open ones are not changed. */
  aim(target: string): void;
  close(): Promise<void>;
}

/** Forwards connections to HOST:PORT until the end of the test. Each chunk arrives after `delayMs` milliseconds. */
export async function startProxy(target: string, { delayMs = 0 } = {}): Promise<Proxy> {
  let [host = '', port = ''] = target.split(':');
  const sockets = new Set<Socket>();
  const fromTarget = new WeakSet<Socket>();
  let stalled = false;
  let forbidden = false;

  function forward(from: Socket, to: Socket): void {
    from.on('data', (chunk) => {
      const write = (): void => void (to.writable && to.write(chunk));
      if (delayMs > 0) setTimeout(write, delayMs);
      else write();
    });
    from.on('error', () => from.destroy());
    from.on('close', () => {
      sockets.delete(from);
      setTimeout(() => to.destroy(), delayMs);
    });
  }

  const server = createServer((client) => {
    if (forbidden) return void client.destroy();
    const upstream = connect(Number(port), host);
    fromTarget.add(upstream);
    for (const socket of [client, upstream]) {
      socket.setNoDelay(true);
      sockets.add(socket);
      if (stalled) socket.pause();
    }
    forward(client, upstream);
    forward(upstream, client);
  });
  const address = `127.0.0.1:${await listenOnLoopback(server)}`;
  const cut = (): void => {
    for (const socket of sockets) socket.destroy();
  };
  atEnd(cut);
  return {
    address,
    stall() {
      stalled = true;
      for (const socket of sockets) socket.pause();
    },
    resume() {
      stalled = false;
      for (const socket of sockets) socket.resume();
    },
    holdAnswers() {
      for (const socket of sockets) if (fromTarget.has(socket)) socket.pause();
    },
    cut,
    refuse() {
      forbidden = true;
    },
    forbid() {
      forbidden = true;
      cut();
    },
    allow() {
      forbidden = false;
    },
    aim(other) {
      [host = '', port = ''] = other.split(':');
    },
    close() {
      cut();
      return new Promise((resolve) => server.close(() => resolve()));
    },
  };
}
