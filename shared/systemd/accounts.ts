// Creates and removes the account that a service runs as, and gives the data directory to that account.
import { lstatSync } from 'node:fs';
import { StartError } from '../errors.ts';
import { must, run } from './control.ts';

export interface Account {
  name: string;
  uid: number;
  gid: number;
}

/** Creates a system account, with a home directory if `home` is given. */
export async function makeAccount(name: string, home: string | undefined): Promise<Account> {
  const where = home ? ['--create-home', `--home-dir=${home}`] : ['--no-create-home', '--home-dir=/'];
  await must('useradd', ['--system', '--user-group', ...where, '--shell=/usr/sbin/nologin', name]);
  const made = await findAccount(name);
  if (!made) throw new StartError(`useradd made no user ${name}`, 1);
  return made;
}

/** Removes an account with its group and home. Throws StartError while a process of the account runs. */
export async function removeAccount(name: string, home: string | undefined): Promise<void> {
  if (home) await must('rm', ['-rf', '--', home]);
  if (await findAccount(name)) await must('userdel', [name]);
  // userdel leaves a group that has other members.
  if ((await run('getent', ['group', name])).code === 0) await must('groupdel', [name]);
}

export async function findAccount(name: string): Promise<Account | undefined> {
  // getent would take a number for a user id.
  if (!/^[A-Za-z_][\w.-]*$/.test(name)) return undefined;
  const { code, stdout } = await run('getent', ['passwd', name]);
  const [found, , uid, gid] = stdout.trim().split(':');
  return code === 0 && found ? { name: found, uid: Number(uid), gid: Number(gid) } : undefined;
}

/**
 * Changes the owner of a data directory to this account. Stops the service first. Removes links, FIFOs and
 * sockets: with these the old owner could choose what the new owner, perhaps root, opens.
 */
export async function takeOver(service: string, directory: string, { uid, gid }: Account): Promise<void> {
  const owner = lstatSync(directory, { throwIfNoEntry: false })?.uid;
  if (owner === undefined || owner === uid || owner === 0) return;
  await run('systemctl', ['stop', service]);
  // The directory is locked before its content changes, so that the old owner cannot enter it any more.
  await must('chown', ['--no-dereference', '0:0', '--', directory]);
  await must('chmod', ['0700', '--', directory]);
  const ofNoUse = ['!', '-type', 'd', '!', '-type', 'f', '!', '-uid', '0'];
  await must('find', [directory, '-mindepth', '1', ...ofNoUse, '-delete']);
  await must('chown', ['--recursive', '--no-dereference', `${uid}:${gid}`, '--', directory]);
}
