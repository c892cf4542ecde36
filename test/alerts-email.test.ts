// Alerts by e-mail, sent to a mail server that the test itself runs, and to aiosmtpd.
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { createServer, type Socket } from 'node:net';
import { expect, onTestFinished, test } from 'vitest';
import { startAlertSystem } from './alerts-fixture.ts';
import { startLateServer } from './late-server.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';

interface MailServer {
  port: number;
  /** The lines of each message, without the SMTP commands for its sender and recipients. */
  mails: string[];
}

const answers: Record<string, string> = {
  QUIT: '221 bye\r\n',
  STARTTLS: '502 not implemented\r\n',
};

/** A mail server without TLS (RFC 5321). It answers `refused` for the second recipient, and accepts all else. */
async function startMailServer(refused = '250 ok'): Promise<MailServer> {
  const mails: string[] = [];
  const server = createServer((socket: Socket) => {
    let [text, envelope, inData] = ['', '', false];
    socket.write('220 mail.test ESMTP\r\n');
    socket.setEncoding('utf8').on('data', (chunk) => {
      text += String(chunk);
      for (let end = text.indexOf('\r\n'); end >= 0; end = text.indexOf('\r\n')) {
        const line = text.slice(0, end);
        text = text.slice(end + 2);
        if (inData && line !== '.') envelope += `${line}\n`;
        else if (inData) {
          inData = false;
          mails.push(envelope);
          socket.write('250 taken\r\n');
        } else if (line === 'DATA') {
          inData = true;
          socket.write('354 go on\r\n');
        } else {
          if (/^(MAIL|RCPT)/.test(line)) envelope += `${line}\n`;
          const isSecond = line.startsWith('RCPT TO:<me@');
          socket.write(isSecond ? `${refused}\r\n` : (answers[line] ?? '250 ok\r\n'));
        }
      }
    });
    socket.on('error', () => undefined);
  });
  return { port: await listenOnLoopback(server), mails };
}

const mail = (port: number) => ({
  ...{ name: 'mail', type: 'email' as const, url: `smtp://127.0.0.1:${port}`, from: 'farhand@example.org' },
  to: ['ops@example.org', 'me@example.org'],
});

test('an alert is one e-mail to all recipients, with the alert as its subject', async () => {
  const system = await startAlertSystem();
  const { port, mails } = await startMailServer();
  const { id: channel_id } = await system.client.alertChannels.create(mail(port));
  expect(await system.client.alertChannels.test({ channel_id })).toMatchObject({ delivered: true });
  await system.client.alertChannels.test({ channel_id });
  const tests = mails.splice(0);
  expect(tests[0]).toContain('Subject: Test of the alert channel mail');
  const ids = tests.map((one) => /^Message-ID: <(evt_\w+)@example.org>$/m.exec(one)?.[1]);
  expect(ids).toEqual([expect.any(String), expect.any(String)]);
  expect(ids[0]).not.toBe(ids[1]);
  const one = await system.machine('web-1');
  await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  await one.report({ cpu: 60 });
  await expect.poll(() => mails.length).toBe(1);
  expect(mails[0]).toMatch(
    /MAIL FROM:<farhand@example.org>.*\nRCPT TO:<ops@example.org>.*\nRCPT TO:<me@example.org>/,
  );
  expect(mails[0]).toMatch(/^Subject: Alert: CPU usage of web-1 is 60 %, above 50 %$/m);
  expect(mails[0]).toMatch(/^Message-ID: <evt_\w+@example.org>$/m);
});

test('a password is not sent to a mail server without TLS, and the delivery says why it failed', async () => {
  const system = await startAlertSystem();
  const { port, mails } = await startMailServer();
  const { id: channel_id } = await system.client.alertChannels.create({
    ...mail(port),
    ...{ user: 'me', secret: 'a password' },
  });
  const { delivered, error } = await system.client.alertChannels.test({ channel_id });
  expect([delivered, mails]).toEqual([false, []]);
  expect(error).toBeTruthy();
});

test('a mail server whose first address does not answer gets the e-mail at its other address', async () => {
  const resolve = async () => ['127.0.0.2', '127.0.0.1'];
  const system = await startAlertSystem({ tuning: { resolve } });
  const { port } = await startMailServer();
  const url = `smtp://mail.example.org:${port}`;
  const { id: channel_id } = await system.client.alertChannels.create({ ...mail(port), url });
  expect(await system.client.alertChannels.test({ channel_id })).toMatchObject({ delivered: true });
});

test('a mail server that is slow to connect gets the e-mail, although its other address refuses connections', async () => {
  const resolve = async () => ['127.0.0.1', '127.0.0.2'];
  const system = await startAlertSystem({ tuning: { resolve } });
  const { port } = await startMailServer();
  const late = await startLateServer(port);
  const url = `smtp://mail.example.org:${late}`;
  const { id: channel_id } = await system.client.alertChannels.create({ ...mail(late), url });
  expect(await system.client.alertChannels.test({ channel_id })).toMatchObject({ delivered: true });
});

test.each([
  ['for good is named, and the others are not sent it again', '550 no such user', true],
  ['for now is named, and the e-mail counts as not delivered', '450 try again later', false],
])('a recipient whom the mail server refuses %s', async (_what, refused, delivered) => {
  const system = await startAlertSystem();
  const { port, mails } = await startMailServer(refused);
  const { id: channel_id } = await system.client.alertChannels.create(mail(port));
  const answer = await system.client.alertChannels.test({ channel_id });
  const error = `the mail server refused me@example.org (${refused.slice(0, 3)})`;
  expect(answer).toMatchObject({ delivered, error });
  expect(mails).toHaveLength(1);
});

test('the next attempt of an e-mail is sent only to the recipients whom the mail server refused for now', async () => {
  const system = await startAlertSystem();
  const { port, mails } = await startMailServer('450 try again later');
  await system.client.alertChannels.create(mail(port));
  const one = await system.machine('web-1');
  await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  await one.report({ cpu: 60 });
  await expect
    .poll(async () => {
      const [channel] = (await system.client.alertChannels.list()).items;
      const { items } = await system.client.alertChannels.deliveries({ channel_id: channel!.id });
      return items[0]?.attempts.length;
    })
    .toBeGreaterThan(2);
  expect(mails).toHaveLength(1);
});

const aiosmtpd = `
import asyncio
from aiosmtpd.smtp import SMTP
class Handler:
    async def handle_DATA(self, server, session, envelope):
        print(",".join(envelope.rcpt_tos), flush=True)
        return "250 OK"
async def main():
    server = await asyncio.get_running_loop().create_server(lambda: SMTP(Handler()), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
`;
/** Debian's own Python, which finds Debian's packages. */
const python = '/usr/bin/python3';
const hasServer = spawnSync(python, ['-c', 'import aiosmtpd']).status === 0;

test.skipIf(!hasServer)('aiosmtpd takes an e-mail (needs the Debian package python3-aiosmtpd)', async () => {
  const child = spawn(python, ['-c', aiosmtpd], { stdio: ['pipe', 'pipe', 'inherit'] });
  onTestFinished(() => void child.kill());
  const [first] = (await once(child.stdout.setEncoding('utf8'), 'data')) as [string];
  const system = await startAlertSystem();
  const { id: channel_id } = await system.client.alertChannels.create(mail(Number(first.trim())));
  const taken = once(child.stdout, 'data');
  expect(await system.client.alertChannels.test({ channel_id })).toMatchObject({ delivered: true });
  expect(String((await taken)[0]).trim()).toBe('ops@example.org,me@example.org');
});
