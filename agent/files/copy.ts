// Copies a file, or a directory with all below it: made beside the destination, which it becomes in one step.
import type { CopyFileResponse } from '../../proto/types/farhand/agent/v1/CopyFileResponse.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs } from './abort.ts';
import { identityOf } from './beneath/boundary.ts';
import { fault, targetOf } from './beneath/path.ts';
import { lookAt } from './draft/index.ts';
import { SideRoom } from './draft/sideroom.ts';
import { arrive, demandTransfer, type Moving, type Transfer } from './move.ts';
import { demandFound } from './remove.ts';
import { entryOf } from './stat.ts';
import { duplicate } from './tree/duplicate.ts';

export function openCopier(moving: Moving): AgentMethods['copyFile'] {
  const { beneath, reading, home } = moving;
  return (request, { signal }) => {
    const [source, destination] = [targetOf(request.source, home), targetOf(request.destination, home)];
    return failingAs(source.path, signal, async () => {
      const from = await reading.entry(source.path);
      try {
        const found = demandFound(from, source.path);
        const to = await beneath.name(destination.path);
        try {
          const { overwrite } = request;
          return await copy(moving, { source, destination, from, to, found, overwrite, signal });
        } finally {
          to.close();
        }
      } finally {
        from.close();
      }
    });
  };
}

async function copy(moving: Moving, transfer: Transfer): Promise<CopyFileResponse> {
  const { beneath, temporary, people, log } = moving;
  const { source, destination, from, to, found, signal } = transfer;
  const { stats } = found;
  if (!stats.isFile() && !stats.isDirectory())
    throw fault('unsupported_file', source.path, 'neither file nor directory');
  await demandTransfer(moving, transfer);
  if (to.found && identityOf(to.found.stats) === identityOf(stats))
    throw fault('invalid_path', destination.path, 'is the source itself');
  const room = await SideRoom.open(to.directory, temporary, log);
  try {
    const what = { parent: from.directory, name: from.name, at: from.at, stats };
    const { boundary } = moving.reading;
    const copied = await duplicate(what, room.content, { boundary, path: source.path, signal, moves: false });
    await arrive(transfer, room.content);
    const made = { path: destination.path, stats: (await lookAt(to.at)) ?? stats, people: await people() };
    return { entry: await entryOf(beneath, to, made), ...copied };
  } finally {
    await room.end();
  }
}
