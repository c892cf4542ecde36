// Two TCP proxies. One divides connections among servers; the other can stall, as if its server had vanished from the
// network.
import { connect, createServer, type Socket } from 'node:net';
import { listen } from '../bench/listen-on-free-port.ts';

/** Starts a proxy that connects each client to the next server, and skips servers that do not answer. */
export async function startRoundRobin(addresses: readonly string[]) {
  let next = 0;
  const left = new Set<string>();
  const sockets = new Set<Socket>();
  const server = createServer((near) => {
    sockets.add(near);
    near.once('close', () => sockets.delete(near)).on('error', () => near.destroy());
    const dial = (tries: number): void => {
      const used = addresses.filter((address) => !left.has(address));
      const [host = '', port] = (used[next++ % used.length] ?? '').split(':');
      const far = connect(Number(port), host);
      far.once('connect', () => {
        near.pipe(far);
        far.pipe(near);
        near.once('close', () => far.destroy());
      });
      far.once('close', () => near.destroy());
      far.on('error', () => {
        if (far.bytesRead > 0 || tries === 0) return near.destroy();
        far.removeAllListeners('close');
        dial(tries - 1);
      });
    };
    dial(addresses.length - 1);
  });
  const port = await listen(server);
  return {
    url: `http://127.0.0.1:${port}`,
    /** Stops giving new connections to this server, as a load balancer does after a failed health check. */
    leave: (address: string) => void left.add(address),
    use: (address: string) => void left.delete(address),
    close(): void {
      server.close();
      for (const socket of sockets) socket.destroy();
    },
  };
}

export type StallingProxy = Awaited<ReturnType<typeof startStallingProxy>>;

/**
 * Starts a proxy that forwards connections to HOST:PORT. While it is stalled, it accepts connections but forwards
 * nothing.
 */
export async function startStallingProxy(target: string) {
  const [host = '', targetPort] = target.split(':');
  let isStalled = false;
  const sockets = new Set<Socket>();
  const forward = (from: Socket, to: Socket): void => {
    sockets.add(from);
    from.setNoDelay(true);
    if (isStalled) from.pause();
    from.on('data', (chunk: Buffer) => {
      if (to.writable && !to.write(chunk)) {
        from.pause();
        to.once('drain', () => void (isStalled || from.resume()));
      }
    });
    from.on('error', () => from.destroy());
    from.once('close', () => {
      sockets.delete(from);
      // While the proxy is stalled, it closes no connection, like a host that has vanished from the network.
      if (!isStalled) to.destroy();
    });
  };
  const server = createServer((near) => {
    const far = connect(Number(targetPort), host);
    forward(near, far);
    forward(far, near);
  });
  const port = await listen(server);
  return {
    address: `127.0.0.1:${port}`,
    stall(): void {
      isStalled = true;
      for (const socket of sockets) socket.pause();
    },
    /**
     * Forwards new connections again. Closes the stalled ones, because a host that has returned resets its old
     * connections.
     */
    resume(): void {
      isStalled = false;
      for (const socket of sockets) socket.destroy();
    },
    close(): void {
      server.close();
      for (const socket of sockets) socket.destroy();
    },
  };
}
