// Measures the key echo of a terminal: alone, beside nineteen other clients, and beside a large download.
//
//   npx node scripts/bench/terminals.ts                        about half a minute
//   npx node scripts/bench/terminals.ts --only alone,crowd     some parts: alone, crowd, download
//
// Needs Linux. The comparison with ssh2 needs Debian's openssh-client and openssh-server; the download needs curl.
//
// A key is one byte, which a `cat` in a raw terminal sends back. Each key is typed after the echo of the previous one.
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { p50AndP99, partsOf, rounded, settle, Table } from './compare-programs-in-turns.ts';
import { connectSsh2 } from './ssh2-client.ts';
import { at, bench, type Farhand, machineId, run, startFarhand } from './start-and-measure-programs.ts';
import { isInstalled, type Ssh, startSsh } from './start-sshd.ts';
import {
  attached,
  echo,
  echoes,
  inTime,
  nextByte,
  startEcho,
  type Typist,
} from './terminals/key-echo-times.ts';

const parts = { alone, crowd, download };

interface Ground {
  folder: string;
  table: Table;
  started: Farhand;
  client: Client;
  machine: string;
  ssh: Ssh | undefined;
}

const keys = 1000;
const crowdSize = 20;
const largeMiB = 1024;
/**
 * Number of bytes of output in the test with a client that never reads. It is more than the window of a terminal and
 * all buffers together can hold.
 */
const floodBytes = 40_000_000;

async function main(folder: string): Promise<void> {
  const { values } = parseArgs({
    options: { only: { type: 'string', default: Object.keys(parts).join(',') } },
  });
  const only = partsOf(values.only, parts);
  const table = new Table();
  const ssh = await startSsh(folder, table);
  const started = await startFarhand(folder);
  const client = new Client({ baseUrl: started.http, apiKey: started.key, retries: 0 });
  const machine = await machineId(started, 0);
  await settle();
  for (const part of only) {
    console.error(`${part} …`);
    const ground = { folder, table, started, client, machine, ssh };
    await parts[part](ground).catch((error: unknown) => table.failure(part, error));
  }
  table.note('programs run from source');
  console.log();
  table.print();
}

// ---- The parts

async function alone({ table, client, machine, ssh }: Ground): Promise<void> {
  const id = await startEcho(client, machine);
  const ours = await echoes(await attached(client, id), keys);
  await client.sessions.end({ session_id: id });
  const shell = ssh && (await overSsh(ssh));
  const peer = shell && (await echoes(shell, keys));
  shell?.close();
  const ratio = peer ? rounded(at(ours, 0.5) / at(peer, 0.5)) : '';
  table.row(
    'key echo, one client: p50 / p99',
    p50AndP99(ours),
    peer ? `a shell over ssh2: ${p50AndP99(peer)}` : '',
    ratio,
  );
}

async function crowd({ table, client, machine }: Ground): Promise<void> {
  const id = await startEcho(client, machine);
  const silent = await neverReading(client, id);
  const others = await Promise.all(Array.from({ length: crowdSize - 1 }, () => attached(client, id)));
  const [typist] = others;
  if (!typist) return;
  const times: number[] = [];
  for (let key = 0; key < keys; key += 1) {
    const pressed = performance.now();
    const heard = others.map((other) => nextByte(other).then(() => times.push(performance.now() - pressed)));
    typist.press();
    await Promise.all(heard);
  }
  times.sort((a, b) => a - b);
  table.row(
    `key echo at each of ${crowdSize - 1} clients beside one that never reads: p50 / p99`,
    p50AndP99(times),
  );
  await client.sessions.end({ session_id: id });
  for (const other of others) other.close();
  silent.destroy();
  await flooded({ table, client, machine });
}

/** Attaches a client that never reads, while a program writes much output and another client reads all of it. */
async function flooded({
  table,
  client,
  machine,
}: Pick<Ground, 'table' | 'client' | 'machine'>): Promise<void> {
  const args = ['-c', `echo ready; read go; stty raw; head -c ${floodBytes} /dev/zero; exec cat`];
  const { id } = await client.sessions.create({ machine_id: machine, shell: '/bin/sh', args });
  const silent = await neverReading(client, id);
  const reader = await attached(client, id);
  const began = performance.now();
  let bytes = 0;
  const all = new Promise<void>((resolve) =>
    reader.hear((more) => {
      bytes += more;
      if (bytes >= floodBytes) resolve();
    }),
  );
  reader.press('\n');
  await inTime(all, () => `only ${bytes} bytes arrived`);
  const seconds = (performance.now() - began) / 1000;
  const { attached_count } = await client.sessions.get({ session_id: id });
  const fate = attached_count === 1 ? 'closed' : `still there (${attached_count} attached)`;
  table.row(
    `${floodBytes / 1e6} MB to one client beside one that never reads`,
    `${rounded(floodBytes / 1e6 / seconds)} MB/s; the client that never reads: ${fate}`,
  );
  await client.sessions.end({ session_id: id });
  reader.close();
  silent.destroy();
}

async function download({ folder, table, started, client, machine }: Ground): Promise<void> {
  if (!isInstalled('curl', table)) return;
  const large = join(folder, 'large');
  await run(`head -c ${largeMiB}M /dev/urandom > ${large}`);
  const id = await startEcho(client, machine);
  const typist = await attached(client, id);
  const quiet = await echoes(typist, keys);
  const url = `${started.http}/api/v1/machines/${machine}/files/download?path=${large}`;
  let over = false;
  const downloaded = run(`curl -sf -o /dev/null -H 'Authorization: Bearer ${started.key}' '${url}'`).finally(
    () => {
      over = true;
    },
  );
  await sleep(200);
  const times: number[] = [];
  while (!over) times.push(...(await echoes(typist, 10)));
  const { seconds } = await downloaded;
  times.sort((a, b) => a - b);
  const what = `key echo during a download of ${largeMiB} MiB: p50 / p99`;
  table.row(
    what,
    p50AndP99(times),
    `without it: ${p50AndP99(quiet)}`,
    rounded(at(times, 0.5) / at(quiet, 0.5)),
  );
  table.row('that download', `${rounded(largeMiB / seconds)} MiB/s, ${times.length} keys meanwhile`);
  typist.close();
  await client.sessions.end({ session_id: id });
}

// ---- Typing

/** Attaches a client that never reads its stream. */
async function neverReading(client: Client, id: string): Promise<Socket> {
  const { stream_url } = await client.sessions.attach({ session_id: id });
  const { host, hostname, port, pathname, search } = new URL(stream_url);
  const socket = connect(Number(port), hostname);
  await once(socket, 'connect');
  socket.pause();
  socket.on('error', () => {});
  const key = Buffer.alloc(16).toString('base64');
  const head = [
    'Upgrade: websocket',
    'Connection: Upgrade',
    'Sec-WebSocket-Version: 13',
    `Sec-WebSocket-Key: ${key}`,
  ];
  socket.write([`GET ${pathname}${search} HTTP/1.1`, `Host: ${host}`, ...head, '', ''].join('\r\n'));
  return socket;
}

async function overSsh(ssh: Ssh): Promise<Typist> {
  const client = await connectSsh2(ssh);
  return new Promise((resolve, reject) => {
    client.exec(echo, { pty: true }, (error, channel) => {
      if (error) return reject(error);
      let listener = (_bytes: number): void => {};
      let ready = false;
      channel.on('data', (bytes: Buffer) => {
        if (ready) return listener(bytes.length);
        ready = true;
        resolve({
          press: (text = 'x') => channel.write(text),
          hear: (next) => {
            listener = next;
          },
          close: () => void client.end(),
        });
      });
    });
  });
}

await bench(main);
