// Join tokens: the REST handlers, and the enrolment of machines with a token.
import { z } from 'zod';
import type { EnrollRequest__Output } from '../proto/types/farhand/link/v1/EnrollRequest.ts';
import type { EnrollResponse } from '../proto/types/farhand/link/v1/EnrollResponse.ts';
import { joinTokens as routes } from '../shared/api/join-tokens.ts';
import type { Handlers, Rights } from '../shared/api/route-table.ts';
import { type JoinTokenId, label, type MachineId, tags } from '../shared/api/shared-schemas.ts';
import { iso, now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { newId, newSecret } from '../shared/ids-and-secrets.ts';
import { joinTokenText } from '../shared/join-token.ts';
import type { Packages } from './agent-packages/index.ts';
import type { Events } from './event-log.ts';
import { found } from './find-or-not-found.ts';
import { hashOf } from './keys/index.ts';
import { pageOf } from './list-pages-and-filters.ts';
import { firstFacts } from './presence/stored-facts-and-metrics.ts';
import type { JoinToken, Machine, State, StateTransaction } from './state/index.ts';

/**
 * Milliseconds for which an expired token stays stored, so that a repeated enrolment still finds its machine.
 */
const keepExpiredMs = 86_400_000;

const enrolment = z.object({
  token: z.string().min(1).max(200),
  public_key: z.instanceof(Buffer).refine((key) => key.length === 32, 'must be a raw Ed25519 public key'),
  name: label(1, 100),
  tags,
  host: z.object({ hostname: label(1, 255), os: label(1, 64), arch: label(1, 64) }),
  agent_version: label(1, 64),
});

interface JoinContext {
  state: State;
  events: Events;
  /** SHA-256 of the broker's CA certificate, in hexadecimal; agents trust only this CA. */
  fingerprint: string;
  packages: Pick<Packages, 'hash' | 'installLine'>;
}

export class JoinTokens {
  readonly #context: JoinContext;

  constructor(context: JoinContext) {
    this.#context = context;
  }

  readonly handlers: Handlers['joinTokens'] = {
    create: async (input, caller) => {
      const secret = newSecret();
      const token: JoinToken = {
        id: newId('joinToken') as JoinTokenId,
        name: input.name ?? null,
        hash: hashOf(secret),
        tags: input.tags ?? null,
        uses: input.uses,
        uses_left: input.uses,
        created_at: iso(),
        expires_at: iso(now() + input.expires_in),
      };
      await this.#context.state.change((transaction) => {
        assertUnlimited(caller.during(transaction));
        dropExpired(transaction);
        transaction.put('join_tokens', token);
        caller.commit(transaction, { join_token_id: token.id });
      });
      const { packages, fingerprint } = this.#context;
      const text = joinTokenText(secret, fingerprint, packages.hash());
      // If the token is for a single machine, the name of the token becomes the name of the machine.
      const name = input.uses === 1 ? input.name : undefined;
      return { ...serialize(token), token: text, ...packages.installLine(text, name) };
    },
    list: (input, caller) => {
      assertUnlimited(caller);
      const { items, total } = pageOf(routes.list, [...this.#context.state.join_tokens.values()], input);
      return { items: items.map(serialize), total };
    },
    remove: async ({ join_token_id }, caller) => {
      await this.#context.state.change((transaction) => {
        assertUnlimited(caller.during(transaction));
        found(transaction.after.join_tokens, 'join_token', join_token_id);
        transaction.remove('join_tokens', join_token_id);
        caller.commit(transaction);
      });
      return { deleted: true };
    },
  };

  /**
   * Registers a machine in one commit. If the request is repeated with the same token and public key, returns the same
   * machine. Throws unauthorized if the token is bad, or if the public key belongs to a machine that joined with
   * another token. Throws validation_failed for a bad field.
   */
  async enroll(request: EnrollRequest__Output, ip: string): Promise<EnrollResponse> {
    const parsed = enrolment.safeParse(request);
    if (!parsed.success) throw new AppError('validation_failed', z.prettifyError(parsed.error));
    const { public_key, token: secret, host, agent_version } = parsed.data;
    const publicKey = public_key.toString('base64');
    const machine = await this.#context.state.change((transaction) => {
      const token = transaction.all('join_tokens').find(({ hash }) => hash === hashOf(secret));
      const enrolled = transaction.all('machines').find((one) => one.public_key === publicKey);
      if (token && enrolled?.join_token_id === token.id) return enrolled;
      const made = admit(transaction, token, enrolled, { ...parsed.data, publicKey });
      transaction.append(firstFacts(made.id, { ...host, ip, agent_version }));
      const data = { hostname: host.hostname, ip, agent_version, last_seen: iso() };
      this.#context.events.emit(transaction, 'machine.registered', made, data);
      return made;
    });
    return { machine_id: machine.id, name: machine.name };
  }
}

/**
 * Throws forbidden for a key that is limited to some machines: with a join token it could add machines with
 * any tag, and so extend its own rights.
 */
function assertUnlimited({ reachable }: Rights): void {
  if (!reachable()) return;
  throw new AppError(
    'forbidden',
    'a key limited to some machines cannot use join tokens: use a key without machine_ids and tags',
  );
}

function admit(
  transaction: StateTransaction,
  token: JoinToken | undefined,
  enrolled: Machine | undefined,
  params: { name: string; tags: string[]; publicKey: string },
): Machine {
  if (!token || Date.parse(token.expires_at) <= now() || token.uses_left < 1 || enrolled) {
    // The message is the same for all reasons, so that it does not help attackers who guess tokens.
    throw new AppError('unauthorized', 'this join token is unknown, used up or expired; create a new one');
  }
  const machine: Machine = {
    id: newId('machine') as MachineId,
    name: params.name,
    tags: token.tags ?? params.tags,
    public_key: params.publicKey,
    join_token_id: token.id,
    created_at: iso(),
  };
  transaction.put('join_tokens', { ...token, uses_left: token.uses_left - 1 });
  transaction.put('machines', machine);
  return machine;
}

function dropExpired(transaction: StateTransaction): void {
  for (const token of transaction.all('join_tokens')) {
    if (Date.parse(token.expires_at) + keepExpiredMs < now()) transaction.remove('join_tokens', token.id);
  }
}

function serialize({ hash: _, ...token }: JoinToken) {
  return token;
}
