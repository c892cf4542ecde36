// Which machines are linked now: the only place that knows, and the way to a machine's stub.
import { AppError } from '../../shared/errors.ts';
import type { AgentStub } from '../../shared/rpc.ts';

/** A machine's link, as long as it lives. */
export interface Link {
  id: string;
  machineId: string;
  /** Changes when the agent starts. */
  instanceId: string;
  /** Tells a restarted agent from a wiped one. */
  journalId: string;
  /** What the agent can do, by the names of agent.proto. */
  methods: readonly string[];
  /** What the agent still kept when it linked; whatever is settled here it may forget. */
  processIds: readonly string[];
  stub: AgentStub;
  /** Ends it: a newer link took over, or the machine was removed. */
  fence(reason: string): void;
  dismiss(reason: string): void;
  /** Ends it: the broker goes away and wants the agent back after this long. */
  drain(retryAfterMs: number): void;
}

export interface Presence {
  /** The machine's stub. Throws AppError machine_offline. */
  get(machineId: string): Link;
  online(machineId: string): boolean;
  readonly count: number;
  /** A link is up; an older one of the same machine is fenced off. Returns the older one. */
  add(link: Link): Link | undefined;
  /** A link is down. Says whether it was the machine's current one. */
  drop(link: Link): boolean;
  /** The machine is not ours any more. */
  remove(machineId: string): void;
  /** Ends every link and spreads the agents' return over `spreadMs`. */
  drain(spreadMs: number): void;
  /** Calls back when a machine's state changed; the result stops it. */
  watch(watcher: (machineId: string, online: boolean) => void): () => void;
}

/** Ids as newId makes them: whatever else a machine names, nobody here has ever asked it to keep. */
const processId = /^[a-z]{1,8}_[0-9A-Za-z]{22}$/;
/** The others come with a later hello, when these are forgotten. */
const mostProcesses = 4096;

/** What of a hello's list can be ids of processes. */
export function keptProcesses(told: readonly string[]): readonly string[] {
  return told.filter((id) => processId.test(id)).slice(0, mostProcesses);
}

export function openPresence(): Presence {
  const links = new Map<string, Link>();
  const watchers = new Set<(machineId: string, online: boolean) => void>();
  const tell = (machineId: string, online: boolean): void => {
    for (const watcher of watchers) watcher(machineId, online);
  };

  return {
    get(machineId) {
      const link = links.get(machineId);
      if (link) return link;
      throw new AppError('machine_offline', 'this machine is not connected now: try again when it is', {
        machine_id: machineId,
      });
    },
    online: (machineId) => links.has(machineId),
    get count() {
      return links.size;
    },
    add(link) {
      const older = links.get(link.machineId);
      links.set(link.machineId, link);
      older?.fence('a newer link with this identity took over');
      tell(link.machineId, true);
      return older;
    },
    drop(link) {
      if (links.get(link.machineId) !== link) return false;
      links.delete(link.machineId);
      tell(link.machineId, false);
      return true;
    },
    remove(machineId) {
      links.get(machineId)?.dismiss('this machine was removed');
    },
    drain(spreadMs) {
      for (const link of [...links.values()]) link.drain(Math.round(Math.random() * spreadMs));
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}
