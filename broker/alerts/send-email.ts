// Sends e-mail through a mail server. The library nodemailer is loaded when the first e-mail is sent.
import { once } from 'node:events';
import { connect, isIP } from 'node:net';
import { unlessAborted } from '../../shared/stop-waiting-on-abort.ts';
import type { AddressGuard } from '../deliveries/address-guard.ts';
import { type Answered, connectionTo } from '../deliveries/attempt-delivery.ts';
import type { Message } from './notification-formats.ts';

interface Mail {
  /** URL of the mail server: `smtps://HOST:PORT` for TLS from the start, `smtp://HOST:PORT` for STARTTLS. */
  url: string;
  user: string | null;
  password: string | null;
  from: string;
  to: readonly string[];
  message: Message;
  /** Id of the message, the same for each attempt, so that mail programs recognize a repeat. */
  id: string;
}

/**
 * Sends an e-mail through a mail server that the address guard allows. The password is sent only over TLS. Rejects if
 * the server does not accept the e-mail. If it refuses some of the recipients, `error` names them. `left`: the
 * recipients whom it refuses only for now; the others must not get the next attempt.
 */
export async function sendMail(
  mail: Mail,
  guard: AddressGuard,
  signal: AbortSignal,
): Promise<{ answered: Answered; left: string[] }> {
  const { url, user, password, from, to, message, id } = mail;
  const { hostname, port, protocol } = new URL(url);
  const secure = protocol === 'smtps:';
  const number = Number(port) || (secure ? 465 : 587);
  const { addresses, isInternal } = await guard.resolve(hostname, number);
  const { createTransport } = await import('nodemailer');
  const host = hostname.replace(/^\[|\]$/g, '');
  // The socket is created here, because nodemailer does not close its own socket when it stops waiting for an
  // answer. The attempt has a deadline, which is shorter than all timeouts of nodemailer.
  signal.throwIfAborted();
  const socket = connect({ host, port: number, ...connectionTo(addresses) });
  const transport = createTransport({
    connection: socket,
    host,
    port: number,
    secure,
    requireTLS: !secure && user !== null,
    // An IP address must not be sent as the server name (RFC 6066).
    ...(isIP(host) === 0 && { tls: { servername: hostname } }),
    ...(user !== null && { auth: { user, pass: password ?? '' } }),
    disableFileAccess: true,
    disableUrlAccess: true,
  });
  try {
    socket.on('error', () => socket.destroy());
    await once(socket, 'connect', { signal });
    guard.refuseSelf(socket);
    const text = [message.title, '', ...message.lines].join('\n');
    const sending = transport.sendMail({
      ...{ from, to: [...to], subject: message.title, text },
      messageId: `<${id}@${from.split('@')[1] ?? 'farhand'}>`,
    });
    const { response, rejectedErrors = [] } = await unlessAborted(signal, sending);
    const refused = rejectedErrors.map(({ recipient, responseCode }) => `${recipient} (${responseCode})`);
    const left = rejectedErrors.flatMap(({ recipient, permanent }) => (permanent ? [] : (recipient ?? [])));
    const error = refused.length === 0 ? null : `the mail server refused ${refused.join(', ')}`.slice(0, 200);
    const answer = isInternal ? null : response.slice(0, 4096);
    return { answered: { delivered: left.length === 0, error, answer }, left };
  } finally {
    transport.close();
    socket.destroy();
  }
}
