// When which delivery is attempted: each webhook has a lane of its own, so that a dead receiver holds up itself alone.
import type { WebhookId } from '../../shared/api/route.ts';
import { typesOf } from '../../shared/api/webhooks.ts';
import { after, monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { State, Webhook } from '../state/index.ts';
import { openLedger, type Written } from './ledger.ts';
import type { Due, Records } from './records.ts';
import type { Outcome, Sender } from './send.ts';
import type { Subscriptions } from './subscriptions.ts';

export interface QueueRooms {
  state: State;
  history: History;
  events: Events;
  records: Records;
  subscriptions: Subscriptions;
  sender: Sender;
}

export interface Patience {
  /** Attempts in all. */
  attempts: number;
  /** Milliseconds before the second attempt, the third and so on; the last one serves for all that follow. */
  waits: readonly number[];
}

export interface Queue {
  /** Begins, with what an earlier broker left. */
  start(): void;
  /** Something may be due for this webhook. */
  wake(id: WebhookId): void;
  /** What waits follows its webhook: no longer told what it no longer names, and at once if it is enabled anew. */
  follow(before: Webhook, after: Webhook): Promise<void>;
  /** Lets attempts under way finish for a while; what is cut is attempted again after the next start. */
  close(): Promise<void>;
}

interface Lane {
  id: WebhookId;
  /** Read ahead from the table. */
  ready: string[];
  /** Attempted, and not yet written how that went. */
  taken: Set<string>;
  running: Set<Attempt>;
  /** Attempts at once: one while it fails, more with each success. */
  width: number;
  waking: boolean;
  givingUp: boolean;
  cancel(): void;
}

interface Attempt {
  due: Due;
  cut: AbortController;
}

const mostWidth = 16;
const readAhead = 64;
const mostTaken = 256;
/** Lanes that have work at a start begin one after another. */
const betweenLanesMs = 10;
const giveUpStep = 500;
const finishMs = 2_000;
/** What the disk refused is tried again after this. */
const againMs = 5_000;

export function openQueue(rooms: QueueRooms, { attempts, waits }: Patience, log: Logger): Queue {
  const { state, history, records, subscriptions, sender } = rooms;
  const lanes = new Map<WebhookId, Lane>();
  const ledger = openLedger(rooms, written, log);
  const closing = new AbortController();
  let open = false;

  function laneOf(id: WebhookId): Lane {
    const lane = lanes.get(id) ?? newLane(id);
    lanes.set(id, lane);
    return lane;
  }

  /** Looks once in this turn, however many ask. */
  function wake(id: WebhookId): void {
    if (!open) return;
    const lane = laneOf(id);
    if (lane.waking) return;
    lane.waking = true;
    setImmediate(() => {
      lane.waking = false;
      look(lane);
    });
  }

  function look(lane: Lane): void {
    try {
      advance(lane);
    } catch (error) {
      log.error({ err: error, webhook_id: lane.id }, 'deliveries could not be read');
      after(againMs, () => wake(lane.id));
    }
  }

  function advance(lane: Lane): void {
    const webhook = state.webhooks.get(lane.id);
    if (!open || lane.givingUp) return;
    if (!webhook) {
      lanes.delete(lane.id);
      return;
    }
    if (!subscriptions.isEnabled(webhook)) {
      void giveUp(lane, subscriptions.disabledReason(webhook) ?? 'webhook_disabled');
      return;
    }
    while (lane.running.size < lane.width && lane.taken.size < mostTaken) {
      // One moment for both: what falls due between two would be neither due nor slept for.
      const at = records.now();
      const id = nextOf(lane, at);
      if (id === undefined) {
        sleepUntilDue(lane, at);
        return;
      }
      begin(lane, webhook, id);
    }
  }

  function nextOf(lane: Lane, until: number): string | undefined {
    if (lane.ready.length === 0) {
      const due = records.due(lane.id, until, readAhead + lane.taken.size);
      lane.ready = due.filter((id) => !lane.taken.has(id));
    }
    return lane.ready.shift();
  }

  function sleepUntilDue(lane: Lane, from: number): void {
    lane.cancel();
    const at = records.nextDue(lane.id, from);
    if (at !== undefined) lane.cancel = after(Math.max(1, at - records.now()), () => wake(lane.id));
  }

  function begin(lane: Lane, webhook: Webhook, id: string): void {
    const due = records.load(id);
    lane.taken.add(id);
    const obstacle = due && subscriptions.obstacle(webhook, due.message.type, due.machineId);
    if (!due || obstacle) {
      void refuse(lane, id, obstacle ?? 'event_gone');
      return;
    }
    const attempt: Attempt = { due, cut: new AbortController() };
    lane.running.add(attempt);
    const signer = subscriptions.signerOf(webhook);
    void sender.send(webhook.url, due.message, signer, attempt.cut.signal).then((outcome) => {
      lane.running.delete(attempt);
      ended(lane, webhook, due, outcome);
      look(lane);
    });
  }

  function ended(lane: Lane, { id: webhookId, armed }: Webhook, due: Due, outcome: Outcome): void {
    if (outcome.aborted) {
      lane.taken.delete(due.id);
      return;
    }
    lane.width = outcome.delivered ? Math.min(mostWidth, lane.width * 2) : 1;
    const last = outcome.delivered || due.tries + 1 >= attempts;
    const next = last ? null : records.now() + waitAfter(due.tries, outcome);
    ledger.add({ webhookId, armed, due, outcome, next });
  }

  /** 10 % more or less, so that many do not come back together; a busy receiver has a say. */
  function waitAfter(tries: number, { retryAfter }: Outcome): number {
    const base = waits[Math.min(tries, waits.length - 1)] ?? 0;
    if (retryAfter !== null) return Math.min(Math.max(retryAfter, base), 2 * base);
    return Math.round(base * (0.9 + Math.random() * 0.2));
  }

  function written(results: readonly Written[]): void {
    for (const { webhookId, due } of results) {
      lanes.get(webhookId)?.taken.delete(due.id);
      wake(webhookId);
    }
  }

  /** The webhook must no longer tell that event, or nobody can: it is too old. */
  async function refuse(lane: Lane, id: string, reason: string): Promise<void> {
    try {
      await history.write(() => records.refuse(id, reason));
    } catch (error) {
      log.error({ err: error, delivery_id: id }, 'a delivery could not be refused');
      await sleep(againMs, closing.signal);
    }
    lane.taken.delete(id);
    wake(lane.id);
  }

  /** What waits for a disabled webhook has failed; it stays, and can be asked for again. */
  async function giveUp(lane: Lane, reason: string): Promise<void> {
    lane.ready = [];
    lane.cancel();
    lane.givingUp = true;
    const enabled = (): boolean => {
      const webhook = state.webhooks.get(lane.id);
      return webhook !== undefined && subscriptions.isEnabled(webhook);
    };
    try {
      while (!enabled() && records.due(lane.id, Number.MAX_SAFE_INTEGER, 1).length > 0) {
        await history.write(() => records.giveUp(lane.id, reason, giveUpStep));
      }
    } catch (error) {
      log.error({ err: error, webhook_id: lane.id }, 'deliveries could not be given up');
    }
    lane.givingUp = false;
    // Whoever enabled it meanwhile found the lane busy.
    if (enabled()) wake(lane.id);
  }

  async function follow(before: Webhook, after: Webhook): Promise<void> {
    const { id, armed, events, machine_ids } = after;
    try {
      // What went wrong up to now waits too.
      await ledger.flush();
      if (events !== before.events || machine_ids !== before.machine_ids) {
        const narrow = () =>
          history.write(() => records.narrow(id, typesOf(events), machine_ids, giveUpStep));
        while ((await narrow()) === giveUpStep);
      }
      if (armed !== before.armed) await history.write(() => records.hasten(id, records.now()));
    } catch (error) {
      log.error({ err: error, webhook_id: id }, 'deliveries that wait could not follow their webhook');
    }
    wake(id);
  }

  /** Begins with what an earlier broker left. Its clock may have been ahead: nothing waits longer than a wait can be. */
  async function takeUp(id: WebhookId): Promise<void> {
    const longest = 2 * Math.max(0, ...waits.slice(0, Math.max(1, attempts - 1)));
    try {
      await history.write(() => records.hasten(id, records.now() + longest));
    } catch (error) {
      log.error({ err: error, webhook_id: id }, 'due times of deliveries could not be limited');
    }
    wake(id);
  }

  /** What is changed is looked at, and what may no longer be told is cut off. */
  function judgeAgain(before: State['webhooks']): void {
    for (const webhook of state.webhooks.values()) {
      if (before.get(webhook.id) !== webhook) wake(webhook.id);
    }
    for (const lane of lanes.values()) {
      for (const { due, cut } of lane.running) {
        const webhook = state.webhooks.get(lane.id);
        if (!webhook || !subscriptions.mayTell(webhook, due.message.type, due.machineId)) cut.abort();
      }
    }
  }

  let known = state.webhooks;
  const stopWatching = state.watch(() => {
    judgeAgain(known);
    known = state.webhooks;
  });

  return {
    start() {
      open = true;
      const left = [...state.webhooks.values()].filter(
        ({ id }) => records.due(id, Number.MAX_SAFE_INTEGER, 1).length > 0,
      );
      for (const { id } of left) {
        const lane = laneOf(id);
        lane.cancel = after(Math.random() * betweenLanesMs * left.length, () => void takeUp(id));
      }
    },
    wake,
    follow,
    async close() {
      open = false;
      closing.abort();
      stopWatching();
      for (const lane of lanes.values()) lane.cancel();
      const busy = (): Attempt[] => [...lanes.values()].flatMap(({ running }) => [...running]);
      const end = monotonic() + finishMs;
      while (busy().length > 0 && monotonic() < end) await sleep(20);
      for (const { cut } of busy()) cut.abort();
      await ledger.flush();
    },
  };
}

function newLane(id: WebhookId): Lane {
  return {
    id,
    ready: [],
    taken: new Set(),
    running: new Set(),
    width: 1,
    waking: false,
    givingUp: false,
    cancel: () => {},
  };
}
