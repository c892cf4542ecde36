// Compares the time to read many small files at once from one real machine with that of sftp on one open connection.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Pool } from 'undici';
import { connectSsh2 } from '../ssh2-client.ts';
import { median, startAgent, timed } from '../start-and-measure-programs.ts';
import { type Ssh, startSsh } from '../start-sshd.ts';
import type { Fleet } from './fleet-context.ts';
import { milliseconds } from './print-figures.ts';

const files = 64;
const fileBytes = 1024;
const rounds = 20;
/** Number of rounds before the measured ones, for Farhand and for sftp. */
const warmUpRounds = 10;

/** Reads all files at the same time. Rejects if a file has the wrong content. */
type ReadAll = () => Promise<void>;

export async function readSmallFiles(fleet: Fleet): Promise<void> {
  const { figures, folder } = fleet;
  const room = join(folder, 'small-files');
  mkdirSync(room);
  const paths = Array.from({ length: files }, (_, n) => join(room, `file-${n}`));
  for (const path of paths) writeFileSync(path, 'x'.repeat(fileBytes));
  const ours = await farhandReader(fleet, paths);
  const ssh = await startSsh(folder, figures);
  const peer = ssh && (await sftpReader(ssh, paths));
  const times = { ours: await medianOf(ours.readAll), peer: peer && (await medianOf(peer.readAll)) };
  await ours.close();
  peer?.close();
  figures.row(
    `${files} files of ${fileBytes / 1024} KiB read at once from a real machine`,
    milliseconds(times.ours),
    times.peer === undefined ? '' : `sftp, one connection: ${milliseconds(times.peer)}`,
    times.peer === undefined ? '' : (times.ours / times.peer).toFixed(2),
  );
}

async function medianOf(readAll: ReadAll): Promise<number> {
  await timed(warmUpRounds, readAll);
  return median(await timed(rounds, readAll));
}

async function farhandReader({ broker, client, folder }: Fleet, paths: string[]) {
  const name = 'real-machine';
  const { token } = await client.joinTokens.create({});
  await startAgent(folder, name, broker.grpc, token);
  const [machine] = (await client.machines.list({ search: name, limit: 1 })).items;
  if (!machine) throw new Error('the real machine has not joined');
  const pool = new Pool(broker.http, { connections: files });
  const headers = { authorization: `Bearer ${broker.key}` };
  const read = async (file: string): Promise<void> => {
    const path = `/api/v1/machines/${machine.id}/files/content?path=${file}`;
    const { statusCode, body } = await pool.request({ method: 'GET', path, headers });
    const text = await body.text();
    if (statusCode !== 200 || !text.includes('x'.repeat(fileBytes)))
      throw new Error(`${file}: answered ${statusCode}`);
  };
  return {
    readAll: async (): Promise<void> => void (await Promise.all(paths.map(read))),
    close: () => pool.close(),
  };
}

async function sftpReader(ssh: Ssh, paths: string[]) {
  const client = await connectSsh2(ssh);
  const opened = Promise.withResolvers<import('ssh2').SFTPWrapper>();
  client.sftp((error, session) => (error ? opened.reject(error) : opened.resolve(session)));
  const sftp = await opened.promise;
  const read = (file: string): Promise<void> =>
    new Promise((resolve, reject) => {
      sftp.readFile(file, (error, bytes) => {
        if (error || bytes.length !== fileBytes) reject(error ?? new Error(`${file} is short`));
        else resolve();
      });
    });
  return {
    readAll: async (): Promise<void> => void (await Promise.all(paths.map(read))),
    close: (): void => void client.end(),
  };
}
