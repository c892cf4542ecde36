// Simulates a distant link: a TCP proxy that forwards every chunk some milliseconds after its arrival.
import { connect, createServer, type Socket } from 'node:net';
import { listenAndReport } from '../listen-on-free-port.ts';

const [target = '', delay = ''] = process.argv.slice(2);
const [host = '', port = ''] = target.split(':');
const delayMs = Number(delay);
/** Maximum number of bytes in transit in one direction. Beyond it, the sender must wait. */
const most = 64 * 1024 * 1024;

function forward(from: Socket, to: Socket): void {
  /** The chunks that are yet to be forwarded, in the order of arrival; undefined stands for the end of the data. */
  const waiting: (Buffer | undefined)[] = [];
  let held = 0;
  const handOn = (): void => {
    const chunk = waiting.shift();
    if (!chunk) return void to.end();
    to.write(chunk, () => {
      held -= chunk.length;
      if (held < most / 2 && from.isPaused()) from.resume();
    });
  };
  from.on('data', (chunk: Buffer) => {
    held += chunk.length;
    if (held >= most) from.pause();
    waiting.push(chunk);
    // All timers have the same length, so they fire in the order of arrival.
    setTimeout(handOn, delayMs);
  });
  from.on('end', () => {
    waiting.push(undefined);
    setTimeout(handOn, delayMs);
  });
  from.on('error', () => from.destroy());
  from.on('close', (broken) => {
    if (broken) setTimeout(() => to.destroy(), delayMs);
  });
}

const server = createServer({ allowHalfOpen: true }, (near) => {
  const far = connect({ host, port: Number(port), allowHalfOpen: true });
  for (const socket of [near, far]) socket.setNoDelay(true);
  forward(near, far);
  forward(far, near);
});
await listenAndReport(server, 'delay is up');
