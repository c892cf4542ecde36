// Sends the same JSON as the broker, with bare koa and router and without any checks. Its requests per second are an
// upper bound for the broker's REST API.
import { createServer } from 'node:http';
import Router from '@koa/router';
import Koa from 'koa';
import { listenAndReport } from './listen-on-free-port.ts';

const [url = '', key = ''] = process.argv.slice(2);
const answer: unknown = await (
  await fetch(url.replace('limit=100', 'limit=20'), { headers: { authorization: `Bearer ${key}` } })
).json();
const router = new Router();
router.get('/api/v1/machines', (ctx) => {
  ctx.body = answer;
});
const app = new Koa();
app.use(router.routes());
const server = createServer((request, response) => void app.callback()(request, response));
await listenAndReport(server, 'bare is up');
