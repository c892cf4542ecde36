// An example receiver of webhooks. It checks the signature of the raw body, answers at once, and then recognizes
// repeated events.
//
//   SECRET=… npx node scripts/examples/receiver.ts 9000     receives at http://127.0.0.1:9000/
//
// Create a webhook with this URL and secret. A broker on the same machine needs --webhook-allow 127.0.0.1.
import { createHmac, timingSafeEqual } from 'node:crypto';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';

interface Event {
  id: string;
  type: string;
  data: unknown;
}

const secret = process.env.SECRET ?? '';
const port = Number(process.argv[2] ?? 9000);
const largest = 1024 * 1024;
/** Ids of received events, because an event may be delivered twice. A real receiver stores the ids in a database. */
const seen = new Set<string>();

async function bodyOf(request: IncomingMessage): Promise<Buffer> {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size > largest) throw new Error('too large');
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

function isGenuine(body: Buffer, header: unknown): boolean {
  const expected = Buffer.from(`sha256=${createHmac('sha256', secret).update(body).digest('hex')}`);
  const given = Buffer.from(typeof header === 'string' ? header : '');
  return given.length === expected.length && timingSafeEqual(given, expected);
}

function work(event: Event): void {
  const again = seen.has(event.id);
  seen.add(event.id);
  console.log(again ? 'again' : 'new', event.type, event.id, JSON.stringify(event.data));
}

async function answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
  try {
    const body = await bodyOf(request);
    if (!isGenuine(body, request.headers['x-service-signature'])) {
      response.writeHead(401).end();
      return;
    }
    // The answer is sent before the work, because a delivery without an answer after 15 seconds is retried.
    response.end();
    work(JSON.parse(body.toString('utf8')) as Event);
  } catch {
    if (!response.headersSent) response.writeHead(400).end();
  }
}

if (secret === '') throw new Error('set the variable SECRET to the secret of the webhook');
const server = createServer((request, response) => void answer(request, response));
server.listen(port, '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${(server.address() as AddressInfo).port}/`);
});
