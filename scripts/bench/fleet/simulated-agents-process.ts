// A process of simulated agents, which fleet-of-agents.ts forks and controls by messages. It ends when the channel to
// its parent closes, even if the parent was killed.
import { createHash, generateKeyPairSync } from 'node:crypto';
import { once } from 'node:events';
import { setPriority } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { connect as connectTls, createSecureContext } from 'node:tls';
import { type Counts, dialSession, enroll, SimulatedAgent, type Way } from './simulated-agent.ts';

export type Order =
  | {
      kind: 'join';
      agents: AgentParams[];
      brokers: string[];
      joinToken: string;
      atOnce: number;
      niceness: number;
    }
  | { kind: 'cut' };

export interface AgentParams {
  name: string;
  tags: string[];
  /** Source address of the agent's connections. */
  source: string;
}

/** The message that a process of simulated agents sends several times a second. */
export interface Progress extends Counts {
  linked: number;
  /** Number of times that machines ran a command. */
  runs: number;
  /** Number of times that a machine ran a command that it had already run. */
  runsTwice: number;
  machineIds: string[];
  failure?: string;
}

const tickMs = 50;
const ticksPerProgress = 4;
/** Maximum number of simultaneous enrolments in one process. */
const enrolWidth = 64;
const enrolTries = 5;
/**
 * Agent `n` sends its first heartbeat after the fraction `(n * goldenShare) % 1` of the heartbeat interval. goldenShare
 * is the fractional part of the golden ratio, which spreads any number of agents evenly.
 */
const goldenShare = 0.618_033_988_75;

const agents: SimulatedAgent[] = [];
const counts: Counts = { dials: 0, refused: 0, welcomes: 0, calls: 0, ends: {} };
let machineIds: string[] = [];
let dialsAtOnce = Number.POSITIVE_INFINITY;
let ticks = 0;

/** Gets the CA as an agent does: from the last certificate of the chain, which must have the hash in the join token. */
async function pinned(broker: string, joinToken: string): Promise<Omit<Way, 'source'>> {
  const [, port = ''] = /:(\d+)$/.exec(broker) ?? [];
  const host = broker.slice(0, -port.length - 1);
  const socket = connectTls({
    host,
    port: Number(port),
    servername: 'farhand-broker',
    ALPNProtocols: ['h2'],
    rejectUnauthorized: false,
  });
  await once(socket, 'secureConnect');
  let certificate = socket.getPeerCertificate(true);
  while (certificate.issuerCertificate && certificate.issuerCertificate !== certificate)
    certificate = certificate.issuerCertificate;
  socket.destroy();
  const fingerprint = createHash('sha256').update(certificate.raw).digest('hex');
  if (fingerprint !== joinToken.split('.')[1]) throw new Error(`${broker} is another broker`);
  const pem = `-----BEGIN CERTIFICATE-----\n${certificate.raw.toString('base64')}\n-----END CERTIFICATE-----\n`;
  const context = createSecureContext({ ca: pem, minVersion: 'TLSv1.3' });
  return { host, port: Number(port), context, fingerprint };
}

async function join(order: Order & { kind: 'join' }): Promise<void> {
  const { agents: params, brokers, joinToken, atOnce, niceness } = order;
  setPriority(niceness);
  const ways = await Promise.all(brokers.map((broker) => pinned(broker, joinToken)));
  const token = joinToken.replace(/^farhand_join_/, '').split('.')[0] ?? '';
  const waiting = [...params.entries()];
  const lane = async (): Promise<void> => {
    for (let next = waiting.shift(); next; next = waiting.shift()) {
      const [n, one] = next;
      const own = ways.map((way) => ({ ...way, source: one.source }));
      await joinOne(own, token, one, n);
    }
  };
  await Promise.all(Array.from({ length: enrolWidth }, lane));
  dialsAtOnce = atOnce;
}

/** Enrols one machine, and links it over the same connection. Tries again after a failure. */
async function joinOne(
  ways: readonly Way[],
  token: string,
  { name, tags }: AgentParams,
  n: number,
): Promise<void> {
  const way = ways[n % ways.length];
  if (!way) return;
  const { publicKey, privateKey } = generateKeyPairSync('ed25519');
  // The last 32 bytes of the DER form are the raw key (RFC 8410, section 4).
  const public_key = publicKey.export({ format: 'der', type: 'spki' }).subarray(-32);
  for (let tries = 1; ; tries += 1) {
    const session = dialSession(way);
    counts.dials += 1;
    try {
      const machineId = await enroll(session, { token, public_key, name, tags });
      const agent = new SimulatedAgent(
        name,
        ways,
        way,
        { machineId, privateKey },
        counts,
        (n * goldenShare) % 1,
      );
      agents.push(agent);
      machineIds.push(machineId);
      agent.linkOver(session);
      return;
    } catch (error) {
      session.destroy();
      if (tries === enrolTries) throw error;
      await sleep(Math.random() * 500 * 2 ** tries);
    }
  }
}

function tick(): void {
  const now = performance.now();
  let dialling = agents.reduce((sum, agent) => sum + Number(agent.isDialling), 0);
  for (const agent of agents) {
    const before = agent.isDialling;
    agent.tick(now, dialling < dialsAtOnce);
    dialling += Number(agent.isDialling) - Number(before);
  }
  ticks += 1;
  if (ticks % ticksPerProgress === 0) report();
}

function report(failure?: string): void {
  const linked = agents.reduce((sum, agent) => sum + Number(agent.isLinked), 0);
  const runs = agents.reduce((sum, { machine }) => sum + machine.runs, 0);
  const runsTwice = agents.reduce((sum, { machine }) => sum + machine.runsTwice, 0);
  // `machineIds` has only the machines that have joined since the previous message.
  const progress: Progress = {
    ...counts,
    linked,
    runs,
    runsTwice,
    machineIds,
    ...(failure !== undefined && { failure }),
  };
  machineIds = [];
  // Sending fails only when the parent has ended, and then this process ends too.
  if (process.connected) process.send?.(progress, () => undefined);
}

process.on('message', (order: Order) => {
  if (order.kind === 'cut') for (const agent of agents) agent.cut();
  else join(order).catch((error: unknown) => report(String(error)));
});
process.once('disconnect', () => process.exit());
// Ctrl-C is ignored here: the parent ends the bench, and then closes the channel.
process.on('SIGINT', () => undefined);
setInterval(tick, tickMs);
