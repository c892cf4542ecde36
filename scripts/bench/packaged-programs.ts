// Creates the directories of both programs as their packages contain them, so that a bench can start the programs as
// users do.
import { join, resolve } from 'node:path';
import { type Commands, root } from './start-and-measure-programs.ts';

/** Creates the programs of a checkout in a new directory. Returns the commands of their launchers. */
export async function makePackagedPrograms(folder: string, checkout: string = root): Promise<Commands> {
  const packaging = join(resolve(checkout), 'scripts/package/program-directories.ts');
  // The compiler cannot check the module of another checkout. The cast is safe if that module has the same exports as
  // the one here.
  const { makeProgram } = (await import(packaging)) as typeof import('../package/program-directories.ts');
  const arch = process.arch === 'arm64' ? 'arm64' : 'x64';
  const make = async (name: 'farhand-broker' | 'farhand-agent'): Promise<string[]> => {
    await makeProgram(name, arch, join(folder, name));
    return [join(folder, name, 'bin', name)];
  };
  return { broker: await make('farhand-broker'), agent: await make('farhand-agent') };
}
