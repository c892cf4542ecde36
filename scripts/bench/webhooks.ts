// Measures webhooks under load: events at a steady rate to five receivers, and the times of REST requests meanwhile.
//
//   npx node scripts/bench/webhooks.ts                          half a minute
//   npx node scripts/bench/webhooks.ts --rate 500 --seconds 5
//
// Each event is one transaction with five deliveries. Each delivery is signed twice and recorded.
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { Agent, request } from 'undici';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { rounded, Table } from './compare-programs-in-turns.ts';
import { Prober } from './fleet/http-load.ts';
import { describeProbe } from './fleet/print-figures.ts';
import { bench, cost, mebibytes, program, type Running } from './start-and-measure-programs.ts';

const webhooks = 5;
const width = 16 * webhooks;
const longestMs = 120_000;

interface Heard {
  total: number;
  unique: number[];
  p50: number;
  p99: number;
}

async function heardBy({ line }: Running): Promise<Heard> {
  return (await (await fetch(line.url ?? '')).json()) as Heard;
}

/**
 * For comparison: measures how many requests per second undici sends without a broker. It sends as many requests at
 * once as the broker sends to all five webhooks together.
 */
async function bare(url: string, seconds: number): Promise<number> {
  const dispatcher = new Agent({ connections: width });
  const end = performance.now() + seconds * 1000;
  const body = JSON.stringify({ text: 'x'.repeat(500) });
  let done = 0;
  const lane = async (): Promise<void> => {
    while (performance.now() < end) {
      const answer = await request(url, { dispatcher, method: 'POST', body });
      await answer.body.dump();
      done += 1;
    }
  };
  await Promise.all(Array.from({ length: width }, lane));
  await dispatcher.close();
  return done / seconds;
}

async function main(folder: string): Promise<void> {
  const { values } = parseArgs({
    options: { rate: { type: 'string', default: '1000' }, seconds: { type: 'string', default: '10' } },
  });
  const [rate, seconds] = [Number(values.rate), Number(values.seconds)];
  const dataDir = join(folder, 'broker');
  const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = await program(
    'scripts/bench/webhooks/broker-with-steady-events.ts',
    [values.rate, values.seconds, ...flags, '--webhook-allow', '127.0.0.1'],
    'broker is up',
  );
  const { http = '' } = broker.line;
  const listener = await program('scripts/bench/webhooks/counting-receiver.ts', [], 'listener is up');
  const key = await withBroker({ dataDir, url: undefined, apiKey: undefined }, async (client) => {
    for (let n = 0; n < webhooks; n += 1) {
      await client.webhooks.create({ url: `${listener.line.url}/${n}`, events: ['*'], secret: 'bench' });
    }
    return (await client.keys.create({ name: 'bench', scopes: ['admin'] })).key;
  });
  const quiet = new Prober(http, '/api/v1/machines', key);
  await sleep(3_000);
  const [alone, idle] = [await quiet.stop(), cost(broker.pid)];

  const begun = performance.now();
  const busy = new Prober(http, '/api/v1/machines', key);
  process.kill(broker.pid, 'SIGUSR2');
  const wanted = rate * seconds;
  let heard = await heardBy(listener);
  while (heard.unique.length < webhooks || heard.unique.some((count) => count < wanted)) {
    if (performance.now() - begun > longestMs)
      throw new Error(
        `each webhook must get ${wanted} deliveries; after ${longestMs / 1000} s they have ${heard.unique.join(', ')}`,
      );
    await sleep(250);
    heard = await heardBy(listener);
  }
  const took = (performance.now() - begun) / 1000;
  const [probed, spent] = [await busy.stop(), cost(broker.pid).cpu - idle.cpu];
  const most = mebibytes(broker.pid, 'VmHWM') - idle.rss;
  const floor = await bare(`${listener.line.url}/bare`, 3);

  const table = new Table();
  const ours = (wanted * webhooks) / took;
  table.row(
    `${rate} events/s for ${seconds} s to ${webhooks} webhooks: deliveries`,
    `${rounded(ours)}/s, ${heard.total - wanted * webhooks} twice`,
    `bare undici, nothing recorded: ${rounded(floor)}/s`,
    (ours / floor).toFixed(2),
  );
  table.row('from the event to its receiver, p50 / p99', `${heard.p50} / ${heard.p99} ms`);
  table.row(
    '`GET /machines` meanwhile',
    describeProbe(probed),
    `without it: ${describeProbe(alone)}`,
    (probed.p50 / alone.p50).toFixed(1),
  );
  table.row('peak memory of the broker, above its memory at idle', `${rounded(most)} MiB`);
  table.row('CPU of the broker', `${((spent / took) * 100).toFixed(0)} % of a core`);
  table.print();
}

await bench(main);
