// Presence: which machines are linked now. For each of them it has the stub, through which the broker calls the agent.
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { AgentStub } from '../../shared/agent-rpcs.ts';
import { AppError } from '../../shared/errors.ts';

export interface Link {
  id: string;
  machineId: string;
  /** Id of the agent process; it changes when the agent restarts. */
  instanceId: string;
  /**
   * Id of the agent's data; it survives a restart of the agent and
   * changes when its data directory is deleted.
   */
  journalId: string;
  /** Names of the methods in agent.proto that the agent offers. */
  methods: readonly string[];
  /**
   * Ids of processes whose results the agent still has, as listed in its hello. Their form is not checked.
   */
  processIds: readonly string[];
  stub: AgentStub;
  /** Sends a last message and ends the link. */
  close(last: Pick<ConnectResponse, 'fenced' | 'removed' | 'drain'>): void;
}

type Watcher = (machineId: string, online: boolean) => void;

export class Presence {
  readonly #links = new Map<string, Link>();
  readonly #watchers = new Set<Watcher>();
  readonly #elsewhereWatchers = new Set<(machineId: string) => void>();
  #version = 0;
  #isElsewhere = (_machineId: string): boolean => false;

  /** Finds the link of a machine; undefined if the machine is offline. */
  find(machineId: string): Link | undefined {
    return this.#links.get(machineId);
  }

  /** Finds the link of a machine. Throws machine_offline if there is none. */
  get(machine_id: string): Link {
    const link = this.find(machine_id);
    if (link) return link;
    const text = 'this machine is offline: try again when its agent is connected';
    throw new AppError('machine_offline', text, { machine_id });
  }

  /** A number that changes whenever a machine goes online or offline. */
  get version(): number {
    return this.#version;
  }

  online(machineId: string): boolean {
    return this.#links.has(machineId);
  }

  /** True if a machine has a link with this broker or another one. */
  linkedAnywhere(machineId: string): boolean {
    return this.#links.has(machineId) || this.#isElsewhere(machineId);
  }

  /** Sets the function that returns whether a machine has a link with another broker. */
  lookElsewhere(isElsewhere: (machineId: string) => boolean): void {
    this.#isElsewhere = isElsewhere;
  }

  /** Must be called when machines get another owner, or go online or offline at another broker. */
  changedElsewhere(machineIds: readonly string[]): void {
    this.#version += 1;
    for (const id of machineIds) for (const watcher of this.#elsewhereWatchers) watcher(id);
  }

  /** Calls `watcher` when a machine may have gone online or offline at another broker. */
  watchElsewhere(watcher: (machineId: string) => void): () => void {
    this.#elsewhereWatchers.add(watcher);
    return () => this.#elsewhereWatchers.delete(watcher);
  }

  get count(): number {
    return this.#links.size;
  }

  /** Adds a link. An older link of the same machine is closed and returned. */
  add(link: Link): Link | undefined {
    const older = this.#links.get(link.machineId);
    this.#links.set(link.machineId, link);
    older?.close({ fenced: { reason: 'another agent with the identity of this machine has connected' } });
    this.#changed(link.machineId, true);
    return older;
  }

  /** Removes a link that has ended, unless a newer one has replaced it. */
  drop(link: Link): void {
    if (this.#links.get(link.machineId) !== link) return;
    this.#links.delete(link.machineId);
    this.#changed(link.machineId, false);
  }

  remove(machineId: string): void {
    this.#links.get(machineId)?.close({ removed: { reason: 'this machine was removed' } });
  }

  /** Ends the links of machines that are not registered any more. */
  removeAllBut(machines: ReadonlyMap<string, unknown>): void {
    for (const id of [...this.#links.keys()]) if (!machines.has(id)) this.remove(id);
  }

  /**
   * Ends the link of a machine that another broker owns now. If the agent still runs, it connects again at a random
   * time within `spreadMs` milliseconds.
   */
  lose(machineId: string, spreadMs: number): void {
    this.#links.get(machineId)?.close({ drain: { retry_after_ms: Math.round(Math.random() * spreadMs) } });
  }

  /** Ends every link. The agents reconnect at random times within `spreadMs` milliseconds. */
  drain(spreadMs: number): void {
    for (const machineId of [...this.#links.keys()]) this.lose(machineId, spreadMs);
  }

  /** Calls `watcher` when a machine goes online or offline. Call the returned function to stop. */
  watch(watcher: Watcher): () => void {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  #changed(machineId: string, online: boolean): void {
    this.#version += 1;
    for (const watcher of this.#watchers) watcher(machineId, online);
  }
}
