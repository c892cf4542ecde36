// The agent's side of the link to the broker: connects, authenticates, answers calls, and reconnects after a
// loss.
import type { KeyObject } from 'node:crypto';
import { arch, hostname } from 'node:os';
import type { Metrics } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import type { ConnectRequest } from '../../proto/types/farhand/link/v1/ConnectRequest.ts';
import type { ConnectResponse__Output } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { LastUpgrade } from '../../proto/types/farhand/link/v1/LastUpgrade.ts';
import type { Welcome__Output } from '../../proto/types/farhand/link/v1/Welcome.ts';
import { controlFlow } from '../../shared/adapt-http2-windows.ts';
import { methods, protocolVersion, shortenQueues } from '../../shared/agent-rpcs.ts';
import { backoff } from '../../shared/backoff.ts';
import { clockFault } from '../../shared/certificate-clock-error.ts';
import { after, every, monotonic, sleep } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import { signProof } from '../../shared/identity-proof.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';
import { version } from '../../shared/version.ts';
import { bootId } from '../boot-id.ts';
import type { Processes } from '../processes/index.ts';
import type { Upgrades } from '../upgrade/index.ts';
import { Calls, type CallsOptions, openCalls } from './answer-calls.ts';
import type { BrokerAddresses } from './broker-addresses.ts';
import { brokerText, type ControlStream, Dial } from './dial.ts';

export interface Identity {
  machineId: string;
  privateKey: KeyObject;
  /** PEM of the only CA certificate that this agent trusts. */
  caCertificate: string;
  /** SHA-256 of `caCertificate` in hexadecimal digits. */
  fingerprint: string;
}

export interface LinkOptions extends Omit<CallsOptions, 'line' | 'control'> {
  brokers: BrokerAddresses;
  identity: Identity;
  roots: readonly string[];
  processes: Pick<Processes, 'missing' | 'journalId' | 'ids'>;
  /** Returns a report of the metrics; null if the owner does not allow metrics. */
  report(): Promise<Metrics | null>;
  upgrades: Pick<Upgrades, 'installation' | 'lastUpgrade'>;
  /** Called whenever the link is established or lost. */
  onLinkChange(linked: boolean, broker: string): void;
  /**
   * Called at each attempt to connect and at each message of the broker. If this function is not called again within
   * `ms` milliseconds, the agent counts as hung and systemd restarts it.
   */
  onProgress(ms: number): void;
}

export class Removed extends StartError {
  constructor(reason: string) {
    super(
      `the broker has removed this machine (${reason}), so the agent stops; to join again, start it with a new join token and the same data directory`,
    );
  }
}

const instanceId = newId('link');
/**
 * Milliseconds to wait after another agent with the same identity has taken over the link. Without a wait the
 * two agents would disconnect each other again and again.
 */
const fencedMs = 30_000;
/**
 * Maximum number of milliseconds from dialing to the broker's challenge. The time is long because the broker queues
 * connections when all agents reconnect at the same time.
 */
const dialMs = 30_000;
/** Maximum number of milliseconds from the challenge to the welcome. */
const greetingMs = 10_000;
/**
 * The broker sets the interval of heartbeats, and how long it may be silent before the agent connects again. These are
 * the limits of both values, in milliseconds.
 */
const shortestBeatMs = 50;
const longestBeatMs = 60_000;
const longestSilenceMs = 300_000;
/** Milliseconds that the connection loop may be late, as on a busy machine, before the agent counts as hung. */
const longestDelayMs = 60_000;
const farewellMs = 1_000;

/**
 * Links the machine to the broker until the signal fires, and reconnects after each loss. Throws StartError
 * if the broker has removed this machine.
 */
export async function keepLinked(options: LinkOptions, signal: AbortSignal): Promise<void> {
  shortenQueues();
  controlFlow('client');
  const wait = backoff();
  while (!signal.aborted) {
    options.onProgress(longestDelayMs);
    const broker = options.brokers.next();
    const line = new Dial(broker, options.identity.caCertificate);
    let failure: unknown;
    const ended = new Connection(options, broker, line, () => wait.reset())
      .run(signal)
      .catch((error: unknown) => {
        if (error instanceof Removed) throw error;
        failure = error;
      });
    const ms = (await ended.finally(() => line.close())) ?? wait.next();
    options.onProgress(ms + longestDelayMs);
    if (!signal.aborted) logRetry(options.log, broker, Math.round(ms), failure);
    await sleep(ms, signal);
  }
}

/**
 * Logs that the agent dials again after `retry_ms` milliseconds. `failure`: why the link failed; undefined if it ended
 * without an error.
 */
function logRetry(log: Logger, broker: string, retry_ms: number, failure: unknown): void {
  const next = 'not linked to the broker; trying again';
  const fault = clockFault(String(failure));
  if (failure === undefined) log.info({ broker, retry_ms }, next);
  else log.warn({ broker, reason: reasonOf(failure), retry_ms }, fault ? `${fault}; trying again` : next);
  if (failure !== undefined) log.debug({ err: failure }, 'the link to the broker failed');
}

class Connection {
  readonly #options: LinkOptions;
  readonly #broker: string;
  readonly #linked: () => void;
  readonly #control: ControlStream;
  readonly #calls: Calls;
  #heardAt = monotonic();
  #silenceMs = dialMs;
  #stopBeating = (): void => {};
  #welcomed = false;
  /** The last upgrade that this connection has reported to the broker, as JSON. */
  #reported = '';

  constructor(options: LinkOptions, broker: string, line: Dial, linked: () => void) {
    this.#options = options;
    this.#broker = broker;
    this.#linked = linked;
    this.#control = line.connect();
    this.#calls = new Calls({ ...options, line, control: this.#control });
  }

  /**
   * Resolves when the connection has ended. If a `drain` or `fenced` message of the broker ended it, the result is the
   * time to wait before the next connection, in milliseconds. Otherwise the result is undefined.
   */
  async run(signal: AbortSignal): Promise<number | undefined> {
    const sendFarewell = (): void => {
      this.#send({ farewell: {} });
      this.#control.end();
      // The stream is cancelled after a second, so that a hung broker does not delay the shutdown.
      after(farewellMs, () => this.#control.cancel());
    };
    const stopWatching = every(1_000, () => this.#watch());
    signal.addEventListener('abort', sendFarewell, { once: true });
    try {
      for await (const message of this.#control as AsyncIterable<ConnectResponse__Output>) {
        this.#heardAt = monotonic();
        this.#options.onProgress(this.#silenceMs + longestDelayMs);
        const retryMs = await this.#take(message);
        if (retryMs !== undefined) return retryMs;
      }
      return undefined;
    } finally {
      signal.removeEventListener('abort', sendFarewell);
      stopWatching();
      this.#stopBeating();
      this.#calls.close();
      this.#control.cancel();
      if (this.#welcomed) this.#options.onLinkChange(false, this.#broker);
    }
  }

  async #take(message: ConnectResponse__Output): Promise<number | undefined> {
    if (message.challenge) {
      this.#silenceMs = greetingMs;
      await this.#sendHello(message.challenge.nonce);
    }
    if (message.welcome) this.#begin(message.welcome);
    if (message.call) this.#call(message.call);
    if (message.cancel) this.#calls.cancel(message.cancel.call_id);
    if (message.drain) return message.drain.retry_after_ms;
    if (message.removed) throw new Removed(brokerText(message.removed.reason));
    if (!message.fenced) return undefined;
    const reason = brokerText(message.fenced.reason);
    this.#options.log.error(
      { reason },
      'the broker ended this link: another agent has linked with the same identity. If this machine is a clone, remove its data directory, and start its agent with a new join token',
    );
    return fencedMs;
  }

  async #sendHello(nonce: Buffer): Promise<void> {
    const { identity, capabilities, roots, processes, upgrades, report } = this.#options;
    const { machineId: machine_id, fingerprint } = identity;
    const { missing, journalId, ids } = processes;
    const installation = upgrades.installation();
    this.#reported = JSON.stringify(installation.last_upgrade);
    this.#send({
      hello: {
        machine_id,
        signature: signProof({ nonce, machine_id, fingerprint }, identity.privateKey),
        protocol: protocolVersion,
        agent_version: version,
        boot_id: bootId(),
        instance_id: instanceId,
        journal_id: journalId,
        methods: [...methods.values()].map(({ name }) => name).filter((name) => !missing.includes(name)),
        limits: { frame_bytes: 256 * 1024, open_calls: openCalls, message_bytes: 1024 * 1024 },
        capabilities: [...capabilities],
        roots: [...roots],
        host: { hostname: hostname(), os: process.platform, arch: arch() },
        metrics: await report(),
        process_ids: ids(),
        installation,
      },
    });
  }

  #begin({ heartbeat_ms, silence_ms, brokers }: Welcome__Output): void {
    if (this.#welcomed) return;
    this.#welcomed = true;
    this.#silenceMs = Math.min(silence_ms, longestSilenceMs);
    const beatMs = Math.min(Math.max(heartbeat_ms, shortestBeatMs), longestBeatMs);
    this.#stopBeating = every(beatMs, () => {
      this.#options.report().then(
        (metrics) => this.#send({ heartbeat: { metrics, ...this.#changedUpgrade() } }),
        (error: unknown) =>
          this.#options.log.warn(
            { err: error },
            'the metrics of this machine could not be read, so a heartbeat was not sent',
          ),
      );
    });
    this.#linked();
    this.#options.brokers
      .linked(this.#broker, brokers)
      .catch((err: unknown) =>
        this.#options.log.error(
          { err },
          'new broker addresses from the broker could not be stored, so the agent forgets them when it stops; check the free disk space',
        ),
      );
    this.#options.log.info({ broker: this.#broker }, 'linked');
    this.#options.onLinkChange(true, this.#broker);
  }

  /** Returns the last upgrade if it has changed since the last report to the broker. */
  #changedUpgrade(): { last_upgrade?: LastUpgrade } {
    const last_upgrade = this.#options.upgrades.lastUpgrade();
    const text = JSON.stringify(last_upgrade);
    if (text === this.#reported || !last_upgrade) return {};
    this.#reported = text;
    return { last_upgrade };
  }

  #call(call: Call__Output): void {
    const { method, request_id } = call;
    if (this.#welcomed)
      this.#calls.take({
        ...call,
        method: brokerText(method),
        request_id: brokerText(request_id),
      });
  }

  #watch(): void {
    if (monotonic() - this.#heardAt < this.#silenceMs) return;
    this.#options.log.warn('the broker has sent nothing for too long; connecting again');
    this.#control.cancel();
  }

  #send(message: ConnectRequest): void {
    if (this.#control.writable) this.#control.write(message);
  }
}
