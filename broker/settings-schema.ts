// The settings of farhand-broker: names, schemas, defaults and help texts.
import { resolve } from 'node:path';
import { z } from 'zod';
import { UsageError } from '../shared/errors.ts';
import {
  common,
  dataDir,
  duration,
  flag,
  hostPort,
  isHostPort,
  logLevel,
  type Settings,
  size,
  words,
} from '../shared/read-settings.ts';
import { type Network, networkOf } from './client-address.ts';

/** Names that --rate-limit accepts. Each stands for a number of requests per minute that an API key may make. */
const plans: Readonly<Record<string, number>> = { free: 100, pro: 1_000, enterprise: 10_000 };
const ratePlan = z
  .union([z.int(), z.string()])
  .transform((value) => plans[value] ?? (/^\d{1,9}$/.test(String(value)) ? Number(value) : 0))
  .refine((limit) => limit > 0, 'must be free, pro, enterprise or a number of requests per minute');

const networks = z.array(z.string()).transform((list, context): Network[] =>
  list.flatMap((text) => {
    const network = networkOf(text);
    if (network) return network;
    context.addIssue(`${text} is neither an IP address nor a network such as 10.0.0.0/8`);
    return [];
  }),
);

/** True if a text is an http or https URL to which a path can be appended. */
const isWhole = (text: string): boolean =>
  /^https?:\/\/[^/?#@\s][^?#@\s]*$/i.test(text) && URL.canParse(text);

export const brokerSettings = {
  data_dir: {
    schema: dataDir('farhand-broker'),
    value: 'DIR',
    help: 'directory of the broker’s state, history and keys',
  },
  database_url: {
    schema: z.string().min(1).optional(),
    value: 'URL',
    help: 'PostgreSQL database for state and history, instead of files in the data directory (docs/postgresql.md)',
  },
  database_password_file: {
    schema: z.string().min(1).optional(),
    value: 'FILE',
    help: 'file with the password for --database-url',
  },
  peer_listen: {
    schema: z.string().pipe(hostPort).optional(),
    value: 'HOST:PORT',
    help: 'address on which this broker listens for other brokers; needed if several brokers share a database',
  },
  peer_url: {
    schema: z.string().refine(isWhole, 'must be a complete URL, such as https://HOST:8422').optional(),
    value: 'URL',
    help: 'URL at which other brokers reach this one (default: https:// with the address of --peer-listen)',
  },
  http: {
    schema: z.string().default('127.0.0.1:8420').pipe(hostPort),
    value: 'HOST:PORT',
    help: 'address on which the REST API listens (default 127.0.0.1:8420)',
  },
  grpc: {
    schema: z.string().default('0.0.0.0:8421').pipe(hostPort),
    value: 'HOST:PORT',
    help: 'address on which the port for agents and gRPC clients listens (default 0.0.0.0:8421)',
  },
  public_url: {
    schema: z.string().refine(isWhole, 'must be a complete URL, such as https://HOST:8420').optional(),
    value: 'URL',
    help: 'URL of the REST API for clients, if it differs from --http',
  },
  public_grpc: {
    schema: z.string().pipe(hostPort).optional(),
    value: 'HOST:PORT',
    help: 'address of this broker for agents, if it differs from --grpc',
  },
  agent_brokers: {
    schema: words.default([]).pipe(z.array(z.string().refine(isHostPort, 'must be HOST:PORT')).max(32)),
    value: 'HOST:PORT',
    repeats: true,
    help: 'new broker addresses to send to all agents; an agent keeps its old ones until a new one has worked',
  },
  insecure_http: { schema: flag, help: 'serve REST without TLS on addresses other than 127.0.0.1' },
  tls_cert: {
    schema: z.string().min(1).optional(),
    value: 'FILE',
    help: 'serve REST over TLS with this certificate and its chain (PEM); the file is read again when it changes',
  },
  tls_key: { schema: z.string().min(1).optional(), value: 'FILE', help: 'private key of --tls-cert, in PEM' },
  tls: {
    schema: flag,
    help: 'serve REST over TLS with a certificate of the broker’s own CA',
  },
  trusted_proxy: {
    schema: words.default([]).pipe(networks),
    value: 'CIDR',
    help: 'reverse proxies whose X-Forwarded headers are trusted, separated by commas (default none)',
  },
  rate_limit: {
    schema: ratePlan.optional(),
    value: 'RATE',
    help: 'requests per minute for each key: free (100), pro (1,000), enterprise (10,000) or N (default unlimited)',
  },
  keep_history: {
    schema: z.string().default('30d').pipe(duration),
    value: 'TIME',
    help: 'how long finished commands are stored (default 30d)',
  },
  keep_output: {
    schema: z.string().default('10GiB').pipe(size),
    value: 'SIZE',
    help: 'disk space for the output of finished commands; the oldest is deleted first (default 10GiB)',
  },
  keep_events: {
    schema: z.string().default('72h').pipe(duration),
    value: 'TIME',
    help: 'how long events are stored (default 72h)',
  },
  keep_audit: {
    schema: z.string().default('365d').pipe(duration),
    value: 'TIME',
    help: 'how long entries of the audit log are stored (default 365d)',
  },
  new_history: {
    schema: flag,
    help: 'start with an empty history.db because the old file was lost; missed schedule runs are skipped',
  },
  old_history: {
    schema: flag,
    help: 'start with a history.db that lacks its last changes; missed schedule runs are skipped',
  },
  accept_state: { schema: flag, help: 'start with a state.json that was edited by hand' },
  local: { schema: flag, help: 'serve only the socket file in the data directory' },
  webhook_allow: {
    schema: words.default([]),
    value: 'CIDR',
    help: 'internal addresses that webhooks may be sent to, separated by commas (default none)',
  },
  webhook_retry: {
    schema: words.default(['1m', '5m', '30m']).pipe(z.array(duration).min(1)),
    value: 'TIMES',
    help: 'times between the attempts of a delivery, each varied by up to 10 % (default 1m,5m,30m)',
  },
  webhook_attempts: {
    schema: z.coerce.number().int().min(1).max(20).default(3),
    value: 'N',
    help: 'number of attempts per delivery; if all of them fail, the webhook is disabled (default 3)',
  },
  heartbeat_url: {
    schema: z
      .string()
      .refine((text) => /^https?:\/\//i.test(text) && URL.canParse(text), 'must be an http or https URL')
      .optional(),
    value: 'URL',
    help: 'URL to call while the broker is alive, so that a service elsewhere notices when the broker fails',
  },
  heartbeat_every: {
    schema: z
      .string()
      .default('1m')
      .pipe(duration.refine((ms) => ms > 0, 'must be more than 0')),
    value: 'TIME',
    help: 'time between two calls of --heartbeat-url (default 1m)',
  },
  packages: {
    schema: z
      .string()
      .transform((path) => resolve(path))
      .optional(),
    value: 'DIR',
    help: 'directory of the agent packages to serve (default: those installed with this broker)',
  },
  log_level: logLevel,
  ...common,
};
export type BrokerSettings = Settings<typeof brokerSettings>;

/**
 * Throws UsageError if the arguments contain the password of a database, because every user of the machine can read the
 * arguments of a process.
 */
export function refusePasswordIn(argv: readonly string[]): void {
  const isOpen = argv.some((text) => /postgres(ql)?:\/\/([^/@]*:[^/@]+@|\S*[?&]password=)/.test(text));
  if (!isOpen) return;
  throw new UsageError(
    '--database-url has a password, which ps shows to all users of this machine: use --database-password-file, or set FARHAND_DATABASE_URL',
  );
}
