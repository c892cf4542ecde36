// What cgroup v2 can do for the kill of a whole tree, where the agent may make cgroups below its own (root, or a unit
// with Delegate=yes): it knows every process that commands have started, and kills those that we may not signal.
import { mkdir, readFile, rmdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** A cgroup in which all commands are born, for the spawners are in it. */
export interface Birthplace {
  /** A spawner; silently nothing where that is not allowed. */
  enter(pid: number): Promise<void>;
  /** Everything that commands have started and that still lives. */
  pids(): Promise<Set<number>>;
  /** What is left in it stays. */
  close(): Promise<void>;
}

/** `name`: that of one agent and no other. Undefined where the agent may make none. */
export async function openBirthplace(name: string, log: Logger): Promise<Birthplace | undefined> {
  const own = await ownCgroup();
  const directory = own && join(own, name);
  const made = directory && (await mkdir(directory, { recursive: true }).then(yes, no));
  if (!directory || !made) {
    log.debug('no cgroup may be made here: a command that clears its environment can hide from a kill');
    return undefined;
  }
  const members = join(directory, 'cgroup.procs');
  return {
    enter: (pid) =>
      writeFile(members, String(pid)).catch((error: unknown) => {
        log.warn({ err: error }, 'a spawner could not be put into a cgroup of its own');
      }),
    pids: async () => new Set((await readFile(members, 'utf8').catch(() => '')).split('\n').map(Number)),
    close: () => rmdir(directory).catch(() => {}),
  };
}

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
function removed(directory: string): Promise<boolean> {
  return rmdir(directory).then(yes, no);
}

const yes = (): boolean => true;
const no = (): boolean => false;

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
