// A receiver of webhooks that records the ids of the events that it got.
import { createServer } from 'node:http';
import { listen } from '../bench/listen-on-free-port.ts';

export async function startReceiver() {
  const ids: string[] = [];
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const event = JSON.parse(Buffer.concat(chunks).toString()) as { id: string };
      ids.push(event.id);
      response.end();
    });
  });
  return { url: `http://127.0.0.1:${await listen(server)}/`, ids, close: () => void server.close() };
}
