// Copies a file, or a directory with all below it: made beside the destination, which it becomes in one step.
import { PrivateDirectory } from './atomic/directory.ts';
import { identityOf } from './confine/fs.ts';
import { fault, targetOf } from './confine/path.ts';
import { describeArrival } from './describe.ts';
import { duplicate } from './duplicate.ts';
import { arrive, assertTransfer } from './move.ts';
import type { Operation } from './operation.ts';

export const copyFile: Operation<'copyFile'> = async (disk, request, source, signal) => {
  const destination = targetOf(request.destination, disk.home);
  await using from = await disk.reading.entry(source.path);
  const { stats } = from.present;
  await using to = await disk.writing.name(destination.path);
  if (!stats.isFile() && !stats.isDirectory())
    throw fault('unsupported_file', source.path, 'neither file nor directory');
  const transfer = { source, destination, from, to, stats, overwrite: request.overwrite, signal };
  await assertTransfer(disk, transfer);
  if (to.found && identityOf(to.found.stats) === identityOf(stats))
    throw fault('invalid_path', destination.path, 'is the source itself');
  await using arriving = await PrivateDirectory.open(to.directory, disk.journal);
  const what = { parent: from.directory, name: from.name, at: from.at, stats };
  const { boundary } = disk.reading;
  const copied = await duplicate(what, arriving.content(), {
    ...{ boundary, path: source.path, signal, moves: false },
  });
  await arrive(transfer, arriving.content());
  return { entry: await describeArrival(disk.writing, to, stats, await disk.users()), ...copied };
};
