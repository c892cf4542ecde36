// Connects the library ssh2 to the sshd of a bench.
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { Client } from 'ssh2';
import type { Ssh } from './start-sshd.ts';

/** Resolves with a connection that has TCP_NODELAY. */
export async function connectSsh2({ port, user, privateKey }: Ssh): Promise<Client> {
  const client = new Client();
  client.connect({ host: '127.0.0.1', port, username: user, privateKey: readFileSync(privateKey) });
  await once(client, 'ready');
  client.setNoDelay(true);
  return client;
}
