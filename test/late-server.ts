// A TCP server that completes connections only after a second, as over a slow network.
import { once } from 'node:events';
import { connect } from 'node:net';
import { Worker } from 'node:worker_threads';
import { atEnd } from './close-after-tests.ts';

/** The thread accepts nothing for 0.7 s. Its queue of two connections is full by then, so the kernel drops others. */
const program = `
  const { parentPort, workerData } = require('node:worker_threads');
  const { connect, createServer } = require('node:net');
  const server = createServer((socket) => {
    const target = connect(workerData, '127.0.0.1');
    for (const one of [socket, target]) one.on('error', () => {});
    socket.pipe(target).pipe(socket);
  });
  server.listen({ host: '127.0.0.1', port: 0, backlog: 1 }, () => {
    parentPort.postMessage(server.address().port);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 700);
  });`;

/** Starts a server that forwards connections to a port of this machine. Returns its own port. */
export async function startLateServer(target: number): Promise<number> {
  const thread = new Worker(program, { eval: true, workerData: target });
  atEnd(() => thread.terminate());
  const [port] = (await once(thread, 'message')) as [number];
  for (let n = 0; n < 2; n += 1) {
    const socket = connect(port, '127.0.0.1');
    atEnd(() => socket.destroy());
    await once(socket, 'connect');
  }
  return port;
}
