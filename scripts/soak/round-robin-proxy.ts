// A TCP proxy that gives each connection to the next server. It skips a server that does not answer.
import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';

export async function startRoundRobin(addresses: readonly string[]) {
  let next = 0;
  const sockets = new Set<Socket>();
  const server = createServer((near) => {
    sockets.add(near);
    near.once('close', () => sockets.delete(near)).on('error', () => near.destroy());
    const dial = (left: number): void => {
      const [host = '', port] = (addresses[next++ % addresses.length] ?? '').split(':');
      const far = connect(Number(port), host);
      far.once('connect', () => {
        near.pipe(far);
        far.pipe(near);
        near.once('close', () => far.destroy());
      });
      far.once('close', () => near.destroy());
      far.on('error', () => {
        if (far.bytesRead > 0 || left === 0) return near.destroy();
        far.removeAllListeners('close');
        dial(left - 1);
      });
    };
    dial(addresses.length - 1);
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  // A server that listens on a host and port has an address of this type.
  const { port } = server.address() as AddressInfo;
  return {
    url: `http://127.0.0.1:${port}`,
    close(): void {
      server.close();
      for (const socket of sockets) socket.destroy();
    },
  };
}
