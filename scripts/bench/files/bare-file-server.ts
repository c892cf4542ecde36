// Streams the files of one folder with bare node:http, by GET and PUT. Its speed is an upper bound for the broker's
// file transfers over HTTP.
import { createReadStream, createWriteStream, statSync } from 'node:fs';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { basename, join } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { listenAndReport } from '../listen-on-free-port.ts';

const [folder = ''] = process.argv.slice(2);

async function serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const path = join(folder, basename(request.url ?? ''));
  if (request.method === 'PUT') {
    await pipeline(request, createWriteStream(path, { flush: true }));
    response.writeHead(201).end();
  } else {
    response.writeHead(200, { 'content-length': statSync(path).size });
    await pipeline(createReadStream(path), response);
  }
}

const server = createServer((request, response) => {
  serve(request, response).catch((error: unknown) => {
    process.stderr.write(`${String(error)}\n`);
    response.destroy();
  });
});
await listenAndReport(server, 'plain is up');
