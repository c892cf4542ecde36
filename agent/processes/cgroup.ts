// The last resort against processes that this user may not signal (sudo in a command): cgroup v2 kills them
// where the agent owns its cgroup (a unit with Delegate=yes).
import { mkdir, readFile, rmdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { sleep } from '../../shared/clock.ts';

/** Moves them into a cgroup of that name below our own and kills it; silently nothing where that is not allowed. */
export async function killByCgroup(name: string, pids: readonly number[]): Promise<void> {
  const own = await ownCgroup();
  if (!own) return;
  const directory = join(own, name);
  // It may be left from the round before.
  await mkdir(directory).catch(() => {});
  for (const pid of pids) await writeFile(join(directory, 'cgroup.procs'), String(pid)).catch(() => {});
  await writeFile(join(directory, 'cgroup.kill'), '1').catch(() => {});
  for (let tries = 0; tries < 10 && !(await removed(directory)); tries++) await sleep(10);
}

/** Busy until the last of them is gone. */
async function removed(directory: string): Promise<boolean> {
  return rmdir(directory).then(
    () => true,
    () => false,
  );
}

/** The folder of the cgroup that this process is in. */
async function ownCgroup(): Promise<string | undefined> {
  const [mounts, groups] = await Promise.all(
    ['mountinfo', 'cgroup'].map((name) => readFile(`/proc/self/${name}`, 'utf8').catch(() => '')),
  );
  const mount = mounts
    ?.split('\n')
    .find((line) => line.includes(' - cgroup2 '))
    ?.split(' ');
  const path = /^0::(.*)$/m.exec(groups ?? '')?.[1];
  const [, , , root, point] = mount ?? [];
  if (!root || !point || !path?.startsWith(root)) return undefined;
  return join(point, path.slice(root.length));
}
