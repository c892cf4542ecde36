// A fleet of simulated agents in several processes, with counts of what they do.
import { type ChildProcess, fork } from 'node:child_process';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { AgentParams, Order, Progress } from './simulated-agents-process.ts';

export interface FleetParams {
  /** HOST:PORT of each broker. The agents are divided among the brokers at first, and may dial any of them later. */
  brokers: string[];
  agents: number;
  /** Maximum number of simultaneous dials of the whole fleet. 0 means no limit, as in a real fleet. */
  dialsAtOnce?: number;
  joinToken: string;
  /**
   * The nice value of the processes that simulate agents (10 by default, so that they do not slow down the broker). Real
   * agents have their own cores. A negative value, which only root can set, imitates that on a busy machine.
   */
  niceness?: number;
}

/** Sums of the counts of all processes with simulated agents. */
export type FleetCounts = Omit<Progress, 'machineIds' | 'failure'>;

const numbers = ['linked', 'dials', 'refused', 'welcomes', 'calls', 'runs', 'runsTwice'] as const;

/** Number of machines with the tag `limited`, for measurements with a key that may use only these. */
const limitedMachines = 100;
/**
 * Number of agents that dial from one source address (127.0.1.x), because one address has too few ports for all agents.
 */
const agentsPerSource = 500;
const pollMs = 50;
const agentsPerProcess = 2_500;

export class FleetOfAgents {
  /** Ids of the machines, in the order in which they joined. */
  readonly machineIds: string[] = [];
  readonly #children: ChildProcess[] = [];
  readonly #latest = new Map<ChildProcess, Progress>();
  #failure: string | undefined;
  #closed = false;

  /** Starts the processes, and makes all agents join. Resolves when all are linked. */
  static async start(params: FleetParams): Promise<FleetOfAgents> {
    const fleet = new FleetOfAgents();
    const { brokers, joinToken, dialsAtOnce = 0, niceness = 10 } = params;
    const processes = Math.ceil(params.agents / agentsPerProcess);
    const agents = agentParams(params.agents);
    const atOnce = dialsAtOnce === 0 ? Number.MAX_SAFE_INTEGER : Math.ceil(dialsAtOnce / processes);
    for (let n = 0; n < processes; n += 1) {
      const own = agents.filter((_, index) => index % processes === n);
      fleet.#order(fleet.#fork(), {
        kind: 'join',
        agents: own,
        brokers,
        joinToken,
        atOnce,
        niceness,
      });
    }
    await fleet.linked(params.agents, 600);
    return fleet;
  }

  /**
   * Waits until `agents` agents are linked; throws after `seconds`. A broker confirms each link with a welcome. After
   * an interruption, pass the earlier number of welcomes as `welcomesBefore`. Then `agents` further welcomes must
   * arrive too, so that no earlier link counts.
   */
  async linked(agents: number, seconds: number, welcomesBefore = 0): Promise<void> {
    const end = performance.now() + seconds * 1000;
    while (this.counts().linked < agents || this.counts().welcomes < welcomesBefore + agents) {
      if (this.#failure !== undefined) throw new Error(this.#failure);
      const { linked, ends } = this.counts();
      if (performance.now() > end)
        throw new Error(
          `${linked} of ${agents} agents are linked after ${seconds} s: ${JSON.stringify(ends)}`,
        );
      await sleep(pollMs);
    }
  }

  counts(): FleetCounts {
    const none = { linked: 0, dials: 0, refused: 0, welcomes: 0, calls: 0, runs: 0, runsTwice: 0 };
    const all: FleetCounts = { ...none, ends: {} };
    for (const progress of this.#latest.values()) {
      for (const name of numbers) all[name] += progress[name];
      for (const [reason, count] of Object.entries(progress.ends))
        all.ends[reason] = (all.ends[reason] ?? 0) + count;
    }
    return all;
  }

  /** Ids of the processes, with which the cost of the simulation itself is measured. */
  get pids(): number[] {
    return this.#children.flatMap(({ pid }) => pid ?? []);
  }

  /** Cuts all connections at once. Every agent dials again. */
  cut(): void {
    for (const child of this.#children) this.#order(child, { kind: 'cut' });
  }

  async close(): Promise<void> {
    this.#closed = true;
    const ended = this.#children
      .filter(({ exitCode, signalCode }) => exitCode === null && signalCode === null)
      .map((child) => new Promise((resolve) => child.once('exit', resolve)));
    for (const child of this.#children) if (child.connected) child.disconnect();
    await Promise.all(ended);
  }

  #fork(): ChildProcess {
    // When this process ends in any way, the channel of fork() closes, which ends the child.
    const child = fork(join(import.meta.dirname, 'simulated-agents-process.ts'));
    this.#children.push(child);
    child.on('message', (progress: Progress) => {
      this.#latest.set(child, progress);
      this.machineIds.push(...progress.machineIds);
      this.#failure ??= progress.failure;
    });
    child.once('exit', (code, signal) => {
      if (!this.#closed) this.#failure ??= `a process of simulated agents ended with ${signal ?? code}`;
    });
    return child;
  }

  #order(child: ChildProcess, order: Order): void {
    child.send(order);
  }
}

function agentParams(count: number): AgentParams[] {
  const every = Math.max(1, Math.floor(count / limitedMachines));
  return Array.from({ length: count }, (_, n) => ({
    name: `node-${String(n).padStart(5, '0')}`,
    tags: ['fleet', `rack-${n % 40}`, ...(n % every === 0 && n / every < limitedMachines ? ['limited'] : [])],
    source: `127.0.1.${1 + Math.floor(n / agentsPerSource)}`,
  }));
}
