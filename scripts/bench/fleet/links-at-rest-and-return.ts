// Measures the links of a fleet: their cost at rest, and the time until all agents are linked again after the broker
// was killed or the network was cut.
import { setTimeout as sleep } from 'node:timers/promises';
import { rounded } from '../compare-programs-in-turns.ts';
import { cost } from '../start-and-measure-programs.ts';
import type { Fleet } from './fleet-context.ts';
import { Prober } from './http-load.ts';
import { describeProbe } from './print-figures.ts';

const settleMs = 20_000;
const profileMs = 8_000;
const minuteMs = 60_000;
const longestReturnS = 240;

/** Measures CPU and memory of the broker while agents only send reports. */
export async function measureRest(fleet: Fleet): Promise<void> {
  await sleep(settleMs);
  await restRow(fleet, 'at rest, before any interruption');
  if (!fleet.broker.isProfiled) return;
  fleet.figures.profile('at rest', await fleet.broker.profile(() => sleep(profileMs)));
}

async function restRow({ broker, agents, baseMiB, figures, settings }: Fleet, what: string): Promise<void> {
  const before = { broker: broker.cpu(), agents: cpuOf(agents.pids) };
  const begun = performance.now();
  await sleep(settings.restSeconds * 1000);
  const seconds = (performance.now() - begun) / 1000;
  const share = (spent: number): string => `${((spent / seconds) * 100).toFixed(1)} % of a core`;
  const memory = broker.memory();
  const each = ((memory - baseMiB) * 1024) / settings.scale;
  figures.row(
    `${what}: CPU of the broker; its private memory, per agent`,
    `${share(broker.cpu() - before.broker)}; ${rounded(memory)} MiB, ${rounded(each)} KiB an agent`,
    `CPU of all simulated agents: ${share(cpuOf(agents.pids) - before.agents)}; memory of the broker before the first link: ${rounded(baseMiB)} MiB`,
  );
}

const cpuOf = (pids: number[]): number => pids.reduce((sum, pid) => sum + cost(pid).cpu, 0);

/** Kills the broker, starts it again, and measures how long all agents take to return. */
export async function returnAfterKill(fleet: Fleet): Promise<void> {
  await measureReturn(fleet, 'all agents linked again after kill -9', async () => {
    await fleet.broker.stop('SIGKILL');
    const begun = performance.now();
    await fleet.broker.restart();
    fleet.figures.line(
      `the broker serves ${((performance.now() - begun) / 1000).toFixed(1)} s after its start`,
    );
  });
}

/** Cuts all connections at once, while the broker keeps running, and measures how long all agents take to return. */
export async function returnAfterCut(fleet: Fleet): Promise<void> {
  await measureReturn(fleet, 'all agents linked again after a network cut', async () => fleet.agents.cut());
}

async function measureReturn(fleet: Fleet, what: string, interrupt: () => Promise<void>): Promise<void> {
  const { broker, agents, figures, settings } = fleet;
  const [before, begun] = [agents.counts(), performance.now()];
  await interrupt();
  const [served, cpu] = [performance.now(), broker.cpu()];
  const prober = new Prober(broker.http, `/api/v1/machines/${agents.machineIds[0]}`, broker.key);
  const top = await broker.profile(() => agents.linked(settings.scale, longestReturnS, before.welcomes));
  const [seconds, sinceServed] = [performance.now() - begun, performance.now() - served].map(
    (ms) => ms / 1000,
  );
  const spent = broker.cpu() - cpu;
  const probed = await prober.stop();
  const after = agents.counts();
  const refused = after.refused - before.refused;
  const dials = (after.dials - before.dials - refused) / settings.scale;
  const each = `dials per agent: ${dials.toFixed(2)} accepted and ${(refused / settings.scale).toFixed(2)} refused by the broker's port`;
  figures.row(
    `${what}: time since the interruption; time since the broker serves again; dials; CPU of the broker`,
    `${seconds?.toFixed(1)} s; ${sinceServed?.toFixed(1)} s; ${each}; ${rounded(spent)} s of CPU`,
  );
  figures.row('`GET /machines/{machine_id}` meanwhile', describeProbe(probed));
  figures.line(`ends of links so far: ${JSON.stringify(after.ends)}`);
  figures.profile(what, top);
}

/** Measures CPU and memory a minute after the agents have linked again. Runs after all cuts and kills. */
export async function restAfterInterruptions(fleet: Fleet): Promise<void> {
  await sleep(minuteMs);
  await restRow(fleet, 'at rest, a minute after the last interruption was over');
}
