// Makes a system in which keys are limited to one of two machines.
import { startFarhand } from './start-farhand.ts';

/** A system with a machine tagged `a`, a machine tagged `b`, and admin keys limited to the first. */
export async function dividedSystem() {
  const system = await startFarhand();
  const [inside, outside] = [await system.agent({ tags: 'a' }), await system.agent({ tags: 'b' })];
  const byId = await system.keyed(['admin'], { machine_ids: [inside.machineId] });
  const byTag = await system.keyed(['admin'], { tags: ['a'] });
  return { system, inside: inside.machineId, outside: outside.machineId, byId, byTag };
}
