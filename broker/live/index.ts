// Live updates: a stream with the changes of the machines, events, commands and batches that its client follows.
import { addAbortListener } from 'node:events';
import type { Topic } from '../../shared/api/live.ts';
import type { Scope } from '../../shared/api/route.ts';
import type { Api, Caller, Handlers, Reply } from '../../shared/api/route-table.ts';
import type { CommandId, MachineId } from '../../shared/api/shared-schemas.ts';
import { sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import type { Commands } from '../commands/command-handlers.ts';
import type { Events } from '../event-log.ts';
import { notFound } from '../find-or-not-found.ts';
import { mergeStreams } from '../merge-streams.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { State } from '../state/index.ts';
import { MachineChanges } from './machine-changes.ts';

type Update = Reply<Api['live']['follow']> extends AsyncIterable<infer T> ? T : never;

interface LiveServices {
  state: State;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  commands: Pick<Commands, 'batches' | 'listed' | 'whereIs' | 'watch'>;
}

/** Shortest time in milliseconds between two updates of the same topic. Events are sent immediately. */
const betweenMs = 1_000;
/**
 * Maximum number of ids of commands in one update. A batch can start thousands of commands in a second. The update then
 * leaves out the oldest ids. This is enough, because any update makes the client load its list of commands again.
 */
const mostCommands = 200;

const scopeOf: Readonly<Record<Topic['kind'], Scope>> = {
  machines: 'machines:read',
  events: 'machines:read',
  commands: 'commands:read',
  batches: 'commands:read',
};

export class LiveUpdates {
  readonly #services: LiveServices;
  /** Aborted to end all open streams. */
  #streams = new AbortController();

  constructor(services: LiveServices) {
    this.#services = services;
  }

  readonly handlers: Handlers['live'] = {
    follow: async ({ topics }, caller) => {
      for (const topic of topics) await this.#assertAllowed(topic, caller);
      const signal = AbortSignal.any([caller.signal, this.#streams.signal, this.#lossOf(topics, caller)]);
      // Watching begins before `ready` is sent, so that a client that loads a list after `ready` misses no
      // change.
      const sources = topics.map((topic) => this.#follow(topic, caller, signal));
      return endless(mergeStreams(sources, signal), signal);
    },
  };

  /** Ends all open streams with this error. */
  endStreams(error: unknown): void {
    this.#streams.abort(error);
    this.#streams = new AbortController();
  }

  /** Ends all open streams and those that begin later. */
  stop(): void {
    this.#streams.abort(new AppError('unavailable', 'the broker is stopping: connect again'));
  }

  /**
   * Returns a signal that fires when the key loses the scope of one of the topics. `caller.signal` does not fire then,
   * because the route itself needs no scope.
   */
  #lossOf(topics: readonly Topic[], caller: Caller): AbortSignal {
    const loss = new AbortController();
    const stop = this.#services.state.watch(() => {
      try {
        for (const topic of topics) assertScope(topic, caller);
      } catch (error) {
        loss.abort(error);
      }
    });
    addAbortListener(caller.signal, stop);
    return loss.signal;
  }

  /**
   * Throws forbidden, command_not_found or batch_not_found. The id in a topic is checked here, because the general
   * check of requests does not find it: a topic is one text, such as `commands:ID`.
   */
  async #assertAllowed(topic: Topic, caller: Caller): Promise<void> {
    const { kind, id } = topic;
    assertScope(topic, caller);
    if (id === '') return;
    const noun = kind === 'commands' ? 'command' : 'batch';
    const { batches } = this.#services.commands;
    const machines = await (kind === 'commands' ? this.#machineOf(id) : batches.machinesOf(id));
    if (machines.length === 0) throw notFound(noun, id);
    if (!machines.some((machine) => caller.reaches(machine)))
      throw new AppError('forbidden', `this key is not allowed to use any machine of ${noun} ${id}`, {
        [`${noun}_id`]: id,
      });
  }

  async #machineOf(command: string): Promise<MachineId[]> {
    const found = await this.#services.commands.whereIs(command);
    return found ? [found.machine] : [];
  }

  #follow({ kind, id }: Topic, caller: Caller, signal: AbortSignal): AsyncGenerator<Update> {
    if (kind === 'machines') return this.#machines(caller, signal);
    if (kind === 'events') return this.#events(caller);
    if (kind === 'commands' && id === '') return this.#commands(caller, signal);
    return kind === 'commands' ? this.#command(id, caller, signal) : this.#batch(id, caller, signal);
  }

  async *#machines(caller: Caller, signal: AbortSignal): AsyncGenerator<Update> {
    const changes = new MachineChanges(this.#services, caller);
    try {
      for (;;) {
        await changes.wait(signal);
        if (signal.aborted || !caller.may('machines:read')) return;
        const data = changes.take();
        if (data) yield { event: 'machines', data };
        await sleep(betweenMs, signal);
      }
    } finally {
      changes.close();
    }
  }

  #events(caller: Caller): AsyncGenerator<Update> {
    const events = this.#services.events.follow(caller);
    return (async function* () {
      for await (const { data } of events) {
        if (!caller.may('machines:read')) return;
        yield { event: 'event', data: { event: data } };
      }
    })();
  }

  /** Yields ids of the commands that were created, started or ended since this call. */
  #commands(caller: Caller, signal: AbortSignal): AsyncGenerator<Update> {
    const changed = new Map<CommandId, MachineId>();
    const woken = new Wake();
    const stop = this.#services.commands.watch((id, machine) => {
      try {
        if (!caller.reaches(machine)) return;
      } catch {
        // The key has expired. The loop below then ends the stream.
        return woken.wake();
      }
      changed.delete(id);
      changed.set(id, machine);
      const [oldest] = changed.keys();
      if (changed.size > mostCommands && oldest !== undefined) changed.delete(oldest);
      woken.wake();
    });
    addAbortListener(signal, stop);
    return (async function* () {
      for (;;) {
        if (changed.size === 0) await woken.wait(signal);
        if (signal.aborted || !caller.may('commands:read')) return;
        const commands = [...changed].flatMap(([id, machine]) => (caller.reaches(machine) ? id : []));
        changed.clear();
        if (commands.length > 0) yield { event: 'commands', data: { commands } };
        await sleep(betweenMs, signal);
      }
    })();
  }

  /** Yields a command whenever it has changed, until its end. */
  async *#command(id: string, caller: Caller, signal: AbortSignal): AsyncGenerator<Update> {
    for (let last = ''; ; await sleep(betweenMs, signal)) {
      const command = (await this.#services.commands.listed([id])).get(id);
      const allowed =
        command && caller.may('commands:read') && caller.reaches(command.machine_id as MachineId);
      if (signal.aborted || !allowed) return;
      const text = JSON.stringify(command);
      if (text !== last) yield { event: 'command', data: { command } };
      if (command.finished_at !== null) return;
      last = text;
    }
  }

  /** Yields a batch whenever its counts have changed, until its end. */
  async *#batch(id: string, caller: Caller, signal: AbortSignal): AsyncGenerator<Update> {
    const { batches } = this.#services.commands;
    const machines = await batches.machinesOf(id);
    for (let last = ''; ; await sleep(betweenMs, signal)) {
      if (signal.aborted || !caller.may('commands:read')) return;
      if (!machines.some((one) => caller.reaches(one))) return;
      const batch = await batches.summary(id, caller.reachable());
      if (signal.aborted) return;
      const text = JSON.stringify(batch);
      if (text !== last) yield { event: 'batch', data: { batch } };
      if (batch.finished_at !== null) return;
      last = text;
    }
  }
}

function assertScope({ kind }: Topic, caller: Caller): void {
  const scope = scopeOf[kind];
  if (caller.may(scope)) return;
  throw new AppError('forbidden', `this key lacks the scope ${scope}: use a key that has it`, {
    required_scope: scope,
  });
}

/** Yields `ready`, then the updates. After the last update the stream stays open until the signal fires. */
async function* endless(updates: AsyncGenerator<Update>, signal: AbortSignal): AsyncGenerator<Update> {
  yield { event: 'ready', data: {} };
  yield* updates;
  await new Wake().wait(signal);
  signal.throwIfAborted();
}
