// Reads facts about the machine: operating system, processor, memory, virtualization, boot, disks and
// interfaces.
import { readdir, readFile, readlink } from 'node:fs/promises';
import os from 'node:os';
import type { InventoryDisk } from '../../proto/types/farhand/agent/v1/InventoryDisk.ts';
import type { InventoryInterface } from '../../proto/types/farhand/agent/v1/InventoryInterface.ts';
import type { InventorySystem } from '../../proto/types/farhand/agent/v1/InventorySystem.ts';
import { exists } from './packages-and-updates.ts';
import { runProgram } from './run-program.ts';

/** Returns the text of a system file; empty if it cannot be read. */
const textOf = (path: string): Promise<string> => readFile(path, 'utf8').catch(() => '');
const lineOf = async (path: string): Promise<string> => (await textOf(path)).trim();

export async function readSystem(signal: AbortSignal): Promise<InventorySystem> {
  const [etc, cpu, memory, stat] = await Promise.all(
    ['/etc/os-release', '/proc/cpuinfo', '/proc/meminfo', '/proc/stat'].map(textOf),
  );
  const release = parseOsRelease(etc || (await textOf('/usr/lib/os-release')));
  const virtualization = await findVirtualization(cpu ?? '', signal);
  const needsReboot = await readRebootRequired();
  return {
    os_id: release.ID ?? '',
    os_version: release.VERSION_ID ?? '',
    os_name: release.PRETTY_NAME ?? '',
    kernel: os.release(),
    arch: os.machine(),
    hostname: os.hostname(),
    // The kernel reports no model name for most ARM processors. Their boards have a name.
    cpu_model:
      /^(?:model name|cpu model|Model)\s*:\s*(.*)$/m.exec(cpu ?? '')?.[1] ??
      (await textOf('/sys/firmware/devicetree/base/model')).replaceAll('\0', ''),
    cpu_cores: (stat ?? '').match(/^cpu\d+ /gm)?.length ?? 1,
    memory_bytes: os.totalmem(),
    swap_bytes: 1024 * Number(/^SwapTotal:\s+(\d+) kB$/m.exec(memory ?? '')?.[1] ?? 0),
    virtualization,
    booted_at_ms: 1000 * Number(/^btime (\d+)$/m.exec(stat ?? '')?.[1] ?? 0),
    ...(needsReboot !== undefined && { reboot_required: needsReboot }),
  };
}

/** Parses lines NAME=VALUE, with values that may be in quotes as in a shell (os-release(5)). */
export function parseOsRelease(text: string): Record<string, string | undefined> {
  const lines = [...text.matchAll(/^(\w+)=(.*)$/gm)];
  return Object.fromEntries(
    lines.map(([, name = '', value = '']) => {
      const [, , inner] = /^(["'])(.*)\1$/.exec(value.trim()) ?? [];
      return [name, (inner ?? value.trim()).replaceAll(/\\(["'$`\\])/g, '$1')];
    }),
  );
}

/**
 * Asks systemd for the kind of virtualization. Without systemd, marker files identify containers, and a flag of the
 * processor identifies virtual machines.
 */
async function findVirtualization(cpu: string, signal: AbortSignal): Promise<string> {
  // Without virtualization, the program prints "none" and its exit code is 1.
  const found = await runProgram('systemd-detect-virt', [], { signal, codes: [1] }).catch(() => '');
  if (found.trim()) return found.trim();
  if (await exists('/.dockerenv')) return 'docker';
  if (await exists('/run/.containerenv')) return 'podman';
  return /^flags\s*:.* hypervisor\b/m.test(cpu) ? 'vm-other' : 'none';
}

/**
 * Returns whether the machine needs a restart. Returns undefined if that is unknown because the machine has no kernel
 * modules.
 */
async function readRebootRequired(): Promise<boolean | undefined> {
  // If a restart is needed, Debian, Ubuntu and SUSE create one of these files.
  for (const file of ['/run/reboot-required', '/var/run/reboot-required', '/run/reboot-needed'])
    if (await exists(file)) return true;
  if ((await exists('/var/lib/dpkg/status')) || (await exists('/usr/bin/zypper'))) return false;
  // On other systems, missing modules of the running kernel mean that another kernel has replaced it.
  const kernels = await readdir('/lib/modules').catch((): string[] => []);
  return kernels.length > 0 ? !kernels.includes(os.release()) : undefined;
}

/** Lists physical and virtual disks. Leaves out partitions, loop devices and memory disks. */
export async function readDisks(): Promise<InventoryDisk[]> {
  const names = await readdir('/sys/block');
  const found = await Promise.all(
    names.map(async (name) => {
      const folder = `/sys/block/${name}`;
      // Only a disk, and not a partition or loop device, has a link called `device`.
      const device = await readlink(`${folder}/device`).catch(() => undefined);
      if (device === undefined) return [];
      const [sectors, model, rotational] = await Promise.all(
        ['size', 'device/model', 'queue/rotational'].map((file) => lineOf(`${folder}/${file}`)),
      );
      // The kernel counts sectors of 512 bytes, whatever the sector size of the disk is.
      return [
        { name, size_bytes: 512 * Number(sectors), model: model ?? '', rotational: rotational === '1' },
      ];
    }),
  );
  return found.flat();
}

export async function readInterfaces(): Promise<InventoryInterface[]> {
  const addresses = os.networkInterfaces();
  const names = await readdir('/sys/class/net').catch(() => Object.keys(addresses));
  const others = names.filter((name) => name !== 'lo');
  return Promise.all(
    others.map(async (name) => ({
      name,
      mac: await lineOf(`/sys/class/net/${name}/address`),
      addresses: (addresses[name] ?? []).flatMap(({ cidr }) => cidr ?? []),
      state: await lineOf(`/sys/class/net/${name}/operstate`),
    })),
  );
}
