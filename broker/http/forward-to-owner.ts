// Forwards requests about a machine to the broker that owns the machine. Before this broker answers a request that is
// not about one machine, it reads the latest changes of all brokers.
import type { Context } from 'koa';
import type { Route } from '../../shared/api/route.ts';
import type { Peers, RequestSubject } from '../cluster/peers/route-to-owner.ts';
import type { Client } from '../request-checks/authenticate.ts';
import { type Guard, mayCall } from '../request-checks/authorize-and-perform.ts';
import type { RawInput } from '../request-checks/parse-api-request.ts';
import type { JsonBody } from './body.ts';

/** The parts of a request that may contain the id of its machine. */
interface Parts {
  /** Returns all parts of the request except its body. */
  read(): RawInput;
  readJson(): Promise<JsonBody | undefined>;
}

/**
 * Returns true once another broker has answered the request; false if this broker must answer it. Throws unavailable if
 * the other broker does not answer.
 */
type Forwarder = (ctx: Context, client: Client, parts: Parts) => Promise<boolean>;

/**
 * Creates the function that forwards requests of one route to the broker that owns the machine. The owner authorizes
 * the request.
 */
export function createForwarder({ route, parser }: Guard<Route>, peers: Peers): Forwarder {
  // Any broker can answer a list.
  if (route.kind === 'list')
    return async () => {
      await peers.refresh();
      return false;
    };
  const inBody = parser.namesMachineInBody;

  async function find(client: Client, { read, readJson }: Parts): Promise<Found> {
    const raw = read();
    const named = await peers.subjectOf(parser.ids(raw));
    if (named) return { subject: named };
    // The body is read only if the client's key has the scope that the route needs.
    const body = inBody && mayCall(client.key, route) ? await readJson() : undefined;
    const inside = body && (await peers.subjectOf(parser.ids({ ...raw, body: body.value })));
    return { subject: inside ?? (route.impliesMachine ? peers.onlyMachine : undefined), body: body?.bytes };
  }

  return async (ctx, client, parts) => {
    if (client.quota?.refusal) return false;
    // If find() fails, for example because of malformed JSON, this broker does not forward the request. It refuses the
    // request itself, and writes the audit record.
    const { subject, body } = await find(client, parts).catch((): Found => ({}));
    if (!subject) await peers.refresh();
    const elsewhere = subject && peers.elsewhere(subject);
    if (!elsewhere) return false;
    // If this broker has not read the body, the body is streamed to the owner, which then checks the size.
    await elsewhere.forward(ctx.req, ctx.res, { client, requestId: String(ctx.state.requestId), body });
    ctx.respond = false;
    return true;
  };
}

interface Found {
  subject?: RequestSubject | undefined;
  /** The body, if it was read. */
  body?: Buffer | undefined;
}
