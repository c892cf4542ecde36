// Starts an sshd on loopback, with its keys and settings in the folder of the bench.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { userInfo } from 'node:os';
import { delimiter, join } from 'node:path';
import type { Table } from './compare-programs-in-turns.ts';
import { freePort } from './listen-on-free-port.ts';
import { run, until } from './start-and-measure-programs.ts';

export interface Ssh {
  port: number;
  /** Options for ssh and scp. With them, the host name `bench` means this server. */
  options: string;
  /** User and path of the private key, for the library ssh2. */
  user: string;
  privateKey: string;
}

/** Debian packages, by the names of programs in them. */
const debianPackages = {
  ssh: 'openssh-client',
  scp: 'openssh-client',
  'ssh-keygen': 'openssh-client',
  sshd: 'openssh-server',
  curl: 'curl',
  rsync: 'rsync',
};

// A directory that sshd needs when it runs as root. On Debian, only the start of the service creates it.
const separation = '/run/sshd';

/** Returns the full path of a program, even if it is only in root's PATH. */
function programPath(name: string): string | undefined {
  const folders = [...(process.env.PATH ?? '').split(delimiter), '/usr/local/sbin', '/usr/sbin', '/sbin'];
  return folders.map((folder) => join(folder, name)).find((path) => existsSync(path));
}

/** True if a program is installed. Otherwise adds a note with the Debian package to install. */
export function isInstalled(name: keyof typeof debianPackages, table: Table): boolean {
  if (programPath(name)) return true;
  table.note(`skipped what needs ${name}: it is not installed (Debian: ${debianPackages[name]})`);
  return false;
}

/** Starts the server. If a program is missing or the start fails, returns undefined, and the table says why. */
export async function startSsh(folder: string, table: Table): Promise<Ssh | undefined> {
  const needed = ['ssh', 'scp', 'ssh-keygen', 'sshd'] as const;
  const missing = needed.filter((name) => !isInstalled(name, table));
  const sshd = programPath('sshd');
  if (!sshd || missing.length > 0) return undefined;
  try {
    return await startSshd(sshd, join(folder, 'ssh'));
  } catch (error) {
    table.failure('sshd does not start, so nothing is compared with transfers over ssh', error);
    return undefined;
  }
}

/** Starts the server, and checks that it runs a command. */
async function startSshd(sshd: string, room: string): Promise<Ssh> {
  mkdirSync(room, { mode: 0o700 });
  if (process.getuid?.() === 0) mkdirSync(separation, { recursive: true, mode: 0o755 });
  for (const name of ['host', 'client']) await run(`ssh-keygen -q -t ed25519 -N '' -f ${join(room, name)}`);
  const port = await freePort();
  const { username: user } = userInfo();
  const privateKey = join(room, 'client');
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
    // The default of 10 is too low for the commands that run over one connection at the same time.
    MaxSessions: 64,
    // Without this variable, bash would read the user's .bashrc before every command.
    SetEnv: 'SHLVL=1',
    Subsystem: 'sftp internal-sftp',
  };
  const client = {
    HostName: '127.0.0.1',
    HostKeyAlias: 'bench',
    Port: port,
    User: user,
    IdentityFile: privateKey,
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
  return { port, options, user, privateKey };
}

/** Opens a master connection. Resolves with the socket for `ssh -S`. */
export async function startMaster({ options }: Ssh, folder: string): Promise<string> {
  const socket = join(folder, 'master');
  // ssh runs the LocalCommand once other ssh processes can use the connection. The printed line reports that.
  const report = ['-o', 'PermitLocalCommand=yes', '-o', 'LocalCommand=echo master is up >&2'];
  const flags = [...options.split(' '), '-M', '-N', '-S', socket, ...report, 'bench'];
  await until('ssh', flags, (text) => (text === 'master is up' ? {} : undefined));
  await run(`ssh ${options} -S ${socket} bench true`);
  return socket;
}

function settings(table: Record<string, string | number>): string {
  return Object.entries(table)
    .map(([name, value]) => `${name} ${value}\n`)
    .join('');
}
