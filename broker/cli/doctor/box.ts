// A broker's data directory on this box: who may read it, what it holds, whether there is room.
import { join } from 'node:path';
import { examineDirectory } from '../../../shared/doctor/directory.ts';
import { type Finding, ok, warn } from '../../../shared/doctor/finding.ts';
import { reachPort, reachSocketFile } from '../../../shared/doctor/reach.ts';
import { unitState } from '../../../shared/doctor/unit.ts';

export async function examineBrokerBox(dataDir: string): Promise<Finding[]> {
  const kept = await examineDirectory(dataDir, ['state.json', 'history.db', 'authority.json']);
  if (kept.some(({ state }) => state === 'fail')) return kept;
  const running = await listens(() => reachSocketFile(join(dataDir, 'broker.sock')));
  return [
    ...kept,
    running
      ? ok('broker here', 'runs')
      : warn(
          'broker here',
          'does not run',
          'systemctl start farhand-broker, or farhand-broker --data-dir DIR',
        ),
    ...(running ? [] : await ports()),
    ...(await unitState('farhand-broker')),
  ];
}

/** A broker that does not run may be one that finds its ports taken. */
async function ports(): Promise<Finding[]> {
  const taken: number[] = [];
  for (const port of [8420, 8421]) if (await listens(() => reachPort('127.0.0.1', port))) taken.push(port);
  if (taken.length === 0) return [ok('ports', '8420 and 8421 are free')];
  const what = `${taken.join(' and ')}: somebody else listens there`;
  return [warn('ports', what, `ss -ltnp tells who; or start the broker with --http and --grpc elsewhere`)];
}

async function listens(reach: () => Promise<void>): Promise<boolean> {
  return reach().then(
    () => true,
    () => false,
  );
}
