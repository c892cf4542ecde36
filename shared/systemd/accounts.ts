// The account that a service runs as, and the owner of its data; an account of our own is removed with the service.
import { lstatSync } from 'node:fs';
import { StartError } from '../errors.ts';
import { must, run } from './control.ts';

export interface Account {
  name: string;
  uid: number;
  gid: number;
}

/** Makes a system account, with a home directory where one is given. */
export async function makeAccount(name: string, home: string | undefined): Promise<Account> {
  const where = home ? ['--create-home', `--home-dir=${home}`] : ['--no-create-home', '--home-dir=/'];
  await must('useradd', ['--system', '--user-group', ...where, '--shell=/usr/sbin/nologin', name]);
  const made = await findAccount(name);
  if (!made) throw new StartError(`useradd made no user ${name}`, 1);
  return made;
}

/** Removes an account with its group and home. Throws StartError while a process of it runs. */
export async function removeAccount(name: string, home: string | undefined): Promise<void> {
  if (home) await must('rm', ['-rf', '--', home]);
  if (await findAccount(name)) await must('userdel', [name]);
  // It may have got other members.
  if ((await run('getent', ['group', name])).code === 0) await must('groupdel', [name]);
}

export async function findAccount(name: string): Promise<Account | undefined> {
  // A number would be taken for an id.
  if (!/^[A-Za-z_][\w.-]*$/.test(name)) return undefined;
  const { code, stdout } = await run('getent', ['passwd', name]);
  const [found, , uid, gid] = stdout.trim().split(':');
  return code === 0 && found ? { name: found, uid: Number(uid), gid: Number(gid) } : undefined;
}

/**
 * Gives a data directory of another user to this one. Its links, FIFOs and sockets are removed: by them the old user
 * would choose what the new one, perhaps root, opens. Stops the service first.
 */
export async function takeOver(service: string, directory: string, { uid, gid }: Account): Promise<void> {
  const owner = lstatSync(directory, { throwIfNoEntry: false })?.uid;
  if (owner === undefined || owner === uid || owner === 0) return;
  await run('systemctl', ['stop', service]);
  // Before the rest, so that the old user cannot get in any more.
  await must('chown', ['--no-dereference', '0:0', '--', directory]);
  await must('chmod', ['0700', '--', directory]);
  const ofNoUse = ['!', '-type', 'd', '!', '-type', 'f', '!', '-uid', '0'];
  await must('find', [directory, '-mindepth', '1', ...ofNoUse, '-delete']);
  await must('chown', ['--recursive', '--no-dereference', `${uid}:${gid}`, '--', directory]);
}
