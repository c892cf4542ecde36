// The account that a service runs as: ours are made at install and go with it.
import { StartError } from '../errors.ts';
import { must, run } from './control.ts';

interface Account {
  name: string;
  uid: number;
  gid: number;
  /** Made by this call. */
  fresh: boolean;
}

/** Finds an account; one of our own is made where it is missing, with a home of its own if told. */
export async function haveAccount(name: string, own: boolean, home: string | undefined): Promise<Account> {
  const found = await lookUp(name);
  if (found) return { ...found, fresh: false };
  if (!own) throw new StartError(`--user ${name}: this machine has no such user`, 1);
  const where = home ? ['--create-home', `--home-dir=${home}`] : ['--no-create-home', '--home-dir=/'];
  await must('useradd', ['--system', '--user-group', ...where, '--shell=/usr/sbin/nologin', name]);
  const made = await lookUp(name);
  if (!made) throw new StartError(`useradd made no user ${name}`, 1);
  return { ...made, fresh: true };
}

/** Takes it away again, with its group and home. Throws StartError while a process of it runs. */
export async function removeAccount(name: string, home: string | undefined): Promise<void> {
  if (home) await must('rm', ['-rf', '--', home]);
  if (await lookUp(name)) await must('userdel', [name]);
  // It may have got other members.
  if ((await run('getent', ['group', name])).code === 0) await must('groupdel', [name]);
}

async function lookUp(name: string): Promise<Omit<Account, 'fresh'> | undefined> {
  // A number would be taken for an id.
  if (!/^[A-Za-z_][\w.-]*$/.test(name)) return undefined;
  const { code, stdout } = await run('getent', ['passwd', name]);
  const [found, , uid, gid] = stdout.trim().split(':');
  return code === 0 && found ? { name: found, uid: Number(uid), gid: Number(gid) } : undefined;
}
