// A receiver of webhooks for the bench. It counts deliveries by path and id, and measures their delays.
import { createServer } from 'node:http';
import { listenAndReport } from '../listen-on-free-port.ts';

const ids = new Map<string, Set<string>>();
const late: number[] = [];
let total = 0;

const server = createServer((request, response) => {
  if (request.method === 'GET') {
    const sorted = late.toSorted((a, b) => a - b);
    const at = (share: number): number => sorted[Math.floor(sorted.length * share)] ?? 0;
    const unique = [...ids.values()].map((seen) => seen.size);
    response.end(JSON.stringify({ total, unique, p50: at(0.5), p99: at(0.99) }));
    return;
  }
  const chunks: Buffer[] = [];
  request.on('data', (chunk: Buffer) => chunks.push(chunk));
  request.on('end', () => {
    const text = Buffer.concat(chunks).toString();
    const timestamp = /"timestamp":"([^"]+)"/.exec(text)?.[1];
    if (timestamp) {
      const seen = ids.get(request.url ?? '') ?? new Set();
      ids.set(request.url ?? '', seen.add(String(request.headers['webhook-id'])));
      late.push(Date.now() - Date.parse(timestamp));
      total += 1;
    }
    response.end();
  });
});
await listenAndReport(server, 'listener is up');
