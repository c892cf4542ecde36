// Lists the ports on which programs of this machine listen, with the process of each port if the agent may see it.
import { readdir, readFile, readlink } from 'node:fs/promises';
import type { InventoryPort } from '../../proto/types/farhand/agent/v1/InventoryPort.ts';

interface Socket {
  protocol: 'tcp' | 'udp';
  address: string;
  port: number;
  inode: string;
}

/**
 * Maximum number of open files to search. The open files of all processes are searched to find the process that owns
 * each socket.
 */
const mostFiles = 200_000;

export async function readPorts(): Promise<InventoryPort[]> {
  const tables = await Promise.all(
    ['tcp', 'tcp6', 'udp', 'udp6'].map(async (name) => {
      // A kernel without IPv6 has no tables for IPv6.
      const text = await readFile(`/proc/net/${name}`, 'utf8').catch(() => '');
      return parseSockets(text, name.startsWith('tcp') ? 'tcp' : 'udp');
    }),
  );
  const sockets = tables.flat();
  const owners = await findOwners(new Set(sockets.map(({ inode }) => inode)));
  const ports = sockets.map(({ inode, ...socket }) => ({
    ...socket,
    ...(owners.get(inode) ?? { process: '', pid: 0 }),
  }));
  // Several sockets of one process may share a port (SO_REUSEPORT).
  const unique = new Map(ports.map((one) => [JSON.stringify(one), one]));
  return [...unique.values()].sort((a, b) => a.port - b.port || (a.protocol < b.protocol ? -1 : 1));
}

/** States of /proc/net: a listening TCP socket, and a UDP socket without a peer. */
const listening = { tcp: '0A', udp: '07' };

/** Parses a table of /proc/net (proc_net_tcp(5)). */
export function parseSockets(text: string, protocol: 'tcp' | 'udp'): Socket[] {
  return text
    .split('\n')
    .slice(1)
    .flatMap((line) => {
      const [, local = '', , state, , , , , , inode = ''] = line.trim().split(/\s+/);
      const [address = '', port = ''] = local.split(':');
      if (state !== listening[protocol]) return [];
      return [{ protocol, address: addressOf(address), port: Number.parseInt(port, 16), inode }];
    });
}

/** Converts an address of /proc/net to its usual form. */
function addressOf(hex: string): string {
  const bytes = Buffer.from(hex, 'hex');
  // The kernel prints every group of four bytes as one number in the processor's byte order. This code expects
  // little-endian, as on x64 and arm64.
  if (bytes.length % 4 === 0) bytes.swap32();
  if (bytes.length === 4) return bytes.join('.');
  const groups = Array.from({ length: 8 }, (_, n) => bytes.readUInt16BE(2 * n).toString(16)).join(':');
  // The URL parser shortens an IPv6 address as RFC 5952 requires.
  return new URL(`http://[${groups}]`).hostname.slice(1, -1);
}

/** Finds the processes that have these sockets open. Leaves out processes whose open files the agent may not see. */
async function findOwners(
  inodes: ReadonlySet<string>,
): Promise<Map<string, { process: string; pid: number }>> {
  const owners = new Map<string, { process: string; pid: number }>();
  let files = 0;
  for (const pid of (await readdir('/proc')).filter((name) => /^\d+$/.test(name))) {
    const open = await readdir(`/proc/${pid}/fd`).catch(() => []);
    files += open.length;
    if (files > mostFiles) break;
    const targets = await Promise.all(open.map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => '')));
    const own = targets.flatMap((target) => /^socket:\[(\d+)\]$/.exec(target)?.[1] ?? []);
    const found = own.filter((inode) => inodes.has(inode) && !owners.has(inode));
    if (found.length === 0) continue;
    const process = (await readFile(`/proc/${pid}/comm`, 'utf8').catch(() => '')).trim();
    for (const inode of found) owners.set(inode, { process, pid: Number(pid) });
  }
  return owners;
}
