// The id of the machine's current boot.
import { readFileSync } from 'node:fs';

let boot: string | undefined;

/** A random id that the kernel makes at each boot of the machine; empty if it cannot be read. */
export function bootId(): string {
  try {
    boot ??= readFileSync('/proc/sys/kernel/random/boot_id', 'latin1').trim();
  } catch {
    boot = '';
  }
  return boot;
}
