// The four ways to run a command that the bench compares, each with the interface Way: Farhand, a local child process,
// the library ssh2, and ssh over a master connection.
import { spawn } from 'node:child_process';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Ssh } from '../start-sshd.ts';

export type WayName = 'farhand' | 'spawn' | 'ssh2' | 'master';

/** What the ways connect to: a broker with an API key and a machine, and an sshd if there is one. */
export interface Targets {
  http: string;
  key: string;
  machine: string;
  /** An sshd, and the socket of its master connection. */
  ssh: (Ssh & { master: string }) | undefined;
}

export interface Read {
  bytes: number;
  seconds: number;
}

export interface Way {
  /** Runs a command to its end. Rejects unless its exit code is 0. */
  run(command: string): Promise<void>;
  /** Runs a command, and reads its output while the command writes it. */
  read(command: string): Promise<Read>;
  close(): Promise<void>;
}

/** The fields of a command's record that say whether the command succeeded. */
interface Answer {
  id: string;
  status: string;
  exit_code: number | null;
}

/** Milliseconds within which the broker must report the final status of a command after the end of its output. */
const recordedMs = 5_000;

/** Opens the connections of a way to run commands. `width` is the number of commands that will run at once. */
export async function startWay(name: WayName, targets: Targets, width: number): Promise<Way> {
  if (name === 'farhand') return farhandWay(targets, width);
  if (name === 'spawn') return childWay('/bin/sh', (command) => ['-c', command]);
  if (!targets.ssh) throw new Error('there is no sshd');
  if (name === 'ssh2') return ssh2Way(targets.ssh);
  const shared = [...targets.ssh.options.split(' '), '-S', targets.ssh.master, 'bench'];
  return childWay('ssh', (command) => [...shared, command]);
}

function childWay(file: string, argsFor: (command: string) => string[]): Way {
  const start = (command: string, stdout: 'ignore' | 'pipe'): { ended: Promise<void>; bytes(): number } => {
    const child = spawn(file, argsFor(command), { stdio: ['ignore', stdout, 'ignore'] });
    let bytes = 0;
    child.stdout?.on('data', (chunk: Buffer) => {
      bytes += chunk.length;
    });
    const ended = new Promise<void>((resolve, reject) => {
      child.once('error', reject);
      child.once('close', (code, signal) => {
        if (code === 0) resolve();
        else reject(new Error(`${file} ended with ${signal ?? code}`));
      });
    });
    return { ended, bytes: () => bytes };
  };
  return {
    run: (command) => start(command, 'ignore').ended,
    read: (command) =>
      clocked(async () => {
        const { ended, bytes } = start(command, 'pipe');
        await ended;
        return bytes();
      }),
    close: async () => {},
  };
}

async function farhandWay({ http, key, machine }: Targets, width: number): Promise<Way> {
  // Imports undici only here. With more libraries this process would be larger, and a larger process forks more slowly.
  // That would falsify the times of the ways that start child processes.
  const { Pool } = await import('undici');
  const pool = new Pool(http, { connections: width });
  const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
  const ask = async (method: 'GET' | 'POST', path: string, body: object | null): Promise<Answer> => {
    const sent = body && JSON.stringify(body);
    const answer = await pool.request({ method, path: `/api/v1${path}`, headers, body: sent });
    const text = await answer.body.text();
    if (answer.statusCode !== (body ? 201 : 200)) {
      throw new Error(`${method} ${path} answered ${answer.statusCode}: ${text.slice(0, 200)}`);
    }
    return (JSON.parse(text) as { data: Answer }).data;
  };
  const follow = async (id: string): Promise<number> => {
    const path = `/api/v1/commands/${id}/output?stream=stdout&offset=0&follow=true`;
    const { statusCode, body } = await pool.request({ method: 'GET', path, headers });
    if (statusCode === 404)
      throw new Error('this version of the broker has no GET /commands/{id}/output (404)');
    if (statusCode !== 200) throw new Error(`the output answered ${statusCode}: ${await body.text()}`);
    let bytes = 0;
    try {
      for await (const chunk of body as AsyncIterable<Buffer>) bytes += chunk.length;
    } catch (error) {
      throw new Error(`the output was cut off after ${bytes} bytes`, { cause: error });
    }
    return bytes;
  };
  return {
    run: async (command) => completed(await ask('POST', '/commands', { machine_id: machine, command })),
    async read(command) {
      let id = '';
      const seen = await clocked(async () => {
        ({ id } = await ask('POST', '/commands', { machine_id: machine, command, wait: 0 }));
        return follow(id);
      });
      const recorded = performance.now() + recordedMs;
      let answer = await ask('GET', `/commands/${id}`, null);
      while (['queued', 'running'].includes(answer.status) && performance.now() < recorded) {
        await sleep(20);
        answer = await ask('GET', `/commands/${id}`, null);
      }
      completed(answer);
      return seen;
    },
    close: () => pool.close(),
  };
}

function completed({ id, status, exit_code }: Answer): void {
  if (status !== 'completed' || exit_code !== 0) throw new Error(`${id} is ${status} with ${exit_code}`);
}

/** Runs all commands over one connection. */
async function ssh2Way(ssh: Ssh): Promise<Way> {
  const { connectSsh2 } = await import('../ssh2-client.ts');
  const client = await connectSsh2(ssh);
  const exec = (command: string): Promise<number> =>
    new Promise((resolve, reject) => {
      client.exec(command, (error, channel) => {
        if (error) return reject(error);
        let bytes = 0;
        let exitCode: number | null = null;
        channel.on('data', (chunk: Buffer) => {
          bytes += chunk.length;
        });
        channel.stderr.resume();
        channel.once('exit', (code: number | null) => {
          exitCode = code;
        });
        channel.once('close', () => {
          if (exitCode === 0) resolve(bytes);
          else reject(new Error(`ssh2 received the exit code ${exitCode}`));
        });
      });
    });
  return {
    run: async (command) => void (await exec(command)),
    read: (command) => clocked(() => exec(command)),
    close: async () => void client.end(),
  };
}

async function clocked(read: () => Promise<number>): Promise<Read> {
  const started = performance.now();
  const bytes = await read();
  return { bytes, seconds: (performance.now() - started) / 1000 };
}
