// Presence: which machines are linked now, with the stub that calls their agent.
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import { AppError } from '../../shared/errors.ts';
import type { AgentStub } from '../../shared/rpc.ts';

/** A machine's link, as long as it lives. */
export interface Link {
  id: string;
  machineId: string;
  /** Changes when the agent starts. */
  instanceId: string;
  /** The same after a restart of the agent, another one when its data directory was wiped. */
  journalId: string;
  /** What the agent can do, by the names of agent.proto. */
  methods: readonly string[];
  /** Processes that the agent still has results of, as its hello lists them: ids of any form. */
  processIds: readonly string[];
  stub: AgentStub;
  /** Ends the link with a last message. */
  close(last: Pick<ConnectResponse, 'fenced' | 'removed' | 'drain'>): void;
}

type Watcher = (machineId: string, online: boolean) => void;

export class Presence {
  readonly #links = new Map<string, Link>();
  readonly #watchers = new Set<Watcher>();

  /** The machine's link. Throws AppError machine_offline. */
  get(machine_id: string): Link {
    const link = this.#links.get(machine_id);
    if (link) return link;
    const text = 'this machine is offline: try again when its agent is connected';
    throw new AppError('machine_offline', text, { machine_id });
  }

  online(machineId: string): boolean {
    return this.#links.has(machineId);
  }

  get count(): number {
    return this.#links.size;
  }

  /** Adds a link; an older one of the same machine is fenced off and returned. */
  add(link: Link): Link | undefined {
    const older = this.#links.get(link.machineId);
    this.#links.set(link.machineId, link);
    older?.close({ fenced: { reason: 'a newer link with this identity took over' } });
    this.#changed(link.machineId, true);
    return older;
  }

  /** Removes a link that has ended. */
  drop(link: Link): void {
    if (this.#links.get(link.machineId) !== link) return;
    this.#links.delete(link.machineId);
    this.#changed(link.machineId, false);
  }

  /** Ends the link of a machine that was removed. */
  remove(machineId: string): void {
    this.#links.get(machineId)?.close({ removed: { reason: 'this machine was removed' } });
  }

  /** Ends every link; the agents come back spread over `spreadMs`. */
  drain(spreadMs: number): void {
    for (const link of [...this.#links.values()])
      link.close({ drain: { retry_after_ms: Math.round(Math.random() * spreadMs) } });
  }

  /** Calls back when a machine's state changed; the result stops it. */
  watch(watcher: Watcher): () => void {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  #changed(machineId: string, online: boolean): void {
    for (const watcher of this.#watchers) watcher(machineId, online);
  }
}
