// An sshd of the bench's own, on loopback, with keys and settings that exist only in the bench's folder.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { userInfo } from 'node:os';
import { delimiter, join } from 'node:path';
import { run, until } from './programs.ts';

export interface Ssh {
  port: number;
  /** Options that lead ssh and scp to the server, which they then call `bench`. */
  options: string;
}

// sshd wants it when root starts it, and Debian's service makes it only when it starts.
const separation = '/run/sshd';

/** The full path of a program, also of one that only root's PATH would find. */
export function programPath(name: string): string | undefined {
  const folders = [...(process.env.PATH ?? '').split(delimiter), '/usr/local/sbin', '/usr/sbin', '/sbin'];
  return folders.map((folder) => join(folder, name)).find((path) => existsSync(path));
}

/** Starts the server and proves that a command runs over it. */
export async function startSshd(sshd: string, room: string): Promise<Ssh> {
  mkdirSync(room, { mode: 0o700 });
  if (process.getuid?.() === 0) mkdirSync(separation, { recursive: true, mode: 0o755 });
  for (const name of ['host', 'client']) await run(`ssh-keygen -q -t ed25519 -N '' -f ${join(room, name)}`);
  const port = await freePort();
  const server = {
    Port: port,
    ListenAddress: '127.0.0.1',
    HostKey: join(room, 'host'),
    AuthorizedKeysFile: join(room, 'client.pub'),
    PidFile: 'none',
    StrictModes: 'no',
    UsePAM: 'no',
    PasswordAuthentication: 'no',
    KbdInteractiveAuthentication: 'no',
    PermitRootLogin: 'prohibit-password',
    Subsystem: 'sftp internal-sftp',
  };
  const client = {
    HostName: '127.0.0.1',
    HostKeyAlias: 'bench',
    Port: port,
    User: userInfo().username,
    IdentityFile: join(room, 'client'),
    IdentitiesOnly: 'yes',
    IdentityAgent: 'none',
    UserKnownHostsFile: join(room, 'known_hosts'),
    GlobalKnownHostsFile: 'none',
    StrictHostKeyChecking: 'yes',
    BatchMode: 'yes',
    ControlPath: 'none',
    LogLevel: 'ERROR',
  };
  writeFileSync(join(room, 'known_hosts'), `bench ${readFileSync(join(room, 'host.pub'), 'utf8')}`);
  writeFileSync(join(room, 'sshd_config'), settings(server));
  writeFileSync(join(room, 'ssh_config'), settings(client));
  const flags = ['-D', '-e', '-f', join(room, 'sshd_config')];
  await until(sshd, flags, (text) => (text.includes('Server listening on') ? {} : undefined));
  const options = `-F ${join(room, 'ssh_config')}`;
  await run(`ssh ${options} bench true`);
  return { port, options };
}

function settings(table: Record<string, string | number>): string {
  return Object.entries(table)
    .map(([name, value]) => `${name} ${value}\n`)
    .join('');
}

/** sshd cannot be told to choose a port itself. */
function freePort(): Promise<number> {
  const server = createServer();
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.listen(0, '127.0.0.1', () => {
      // A listening TCP server has an address and a port.
      const { port } = server.address() as AddressInfo;
      server.close(() => resolve(port));
    });
  });
}
