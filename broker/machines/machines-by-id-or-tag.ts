// Selects the machines that a request names, or that have all tags of a request.
import { mostMachines } from '../../shared/api/batches.ts';
import type { Caller } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared } from '../state/index.ts';

/**
 * Returns the named machines, or those of the caller's machines that have all tags. Throws validation_failed if the
 * tags match no machine or too many.
 */
export function machinesNamedOrTagged(
  {
    machine_ids,
    tags,
  }: { machine_ids?: readonly MachineId[] | undefined; tags?: readonly string[] | undefined },
  caller: Caller,
  { machines }: Pick<Declared, 'machines'>,
): MachineId[] {
  if (machine_ids) return [...new Set(machine_ids)];
  // Empty `tags` match no machine. Otherwise they would match every machine, and a command or upgrade could start on
  // all machines by mistake.
  const named = tags && tags.length > 0;
  const matching = [...machines.values()].filter(
    (machine) => named && caller.reaches(machine.id) && tags.every((tag) => machine.tags.includes(tag)),
  );
  if (matching.length === 0 || matching.length > mostMachines) {
    const having =
      matching.length === 0
        ? 'no machine that this key may use has'
        : `more than ${mostMachines} machines have`;
    const message = named ? `${having} all of the tags ${tags.join(', ')}` : 'must name at least one tag';
    const issues = [{ path: 'tags', message }];
    throw new AppError('validation_failed', named ? message : `body: tags: ${message}`, { issues });
  }
  return matching.map((machine) => machine.id);
}
