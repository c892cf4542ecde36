// Lets another broker write files on a machine of this broker. This is the receiving half of a copy between machines
// of two brokers.
import type { Metadata, Server, ServerReadableStream, sendUnaryData } from '@grpc/grpc-js';
import type { CallOptions } from '../../shared/agent-rpcs.ts';
import { fileWriterService } from '../../shared/agent-rpcs.ts';
import { machineId as machineIds } from '../../shared/api/shared-schemas.ts';
import { AppError } from '../../shared/errors.ts';
import { requestIdFrom } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { rightsOf } from '../keys/rights.ts';
import type { Presence } from '../presence/index.ts';
import type { Client } from '../request-checks/authenticate.ts';
import { publicError } from '../request-checks/public-error.ts';
import type { State } from '../state/index.ts';
import { refusalOf } from './incoming-call.ts';

interface Services {
  presence: Presence;
  state: State;
  /** Returns the client on whose behalf the other broker calls. */
  clientOf(headers: Metadata): Promise<Client>;
  /** Name of the header with the id of the machine. */
  machineHeader: string;
  log: Logger;
}

type Rpc = keyof typeof fileWriterService;
type Write = (messages: AsyncIterable<unknown>, options: CallOptions) => Promise<unknown>;

/** Adds the rpcs to a server that only brokers can call. */
export function addFileWriter(server: Server, services: Services): void {
  const { log } = services;
  const handlerOf =
    (rpc: Rpc) =>
    (call: ServerReadableStream<unknown, unknown>, reply: sendUnaryData<unknown>): void => {
      const [given = ''] = call.metadata.get('x-request-id');
      const request_id = requestIdFrom(String(given));
      write(rpc, call, request_id, services).then(
        (answer) => reply(null, answer),
        (error: unknown) => {
          const about = { request_id, path: call.getPath() };
          reply(refusalOf(publicError(error, about, log), request_id));
        },
      );
    };
  server.addService(fileWriterService, {
    writeFile: handlerOf('writeFile'),
    writeArchive: handlerOf('writeArchive'),
  });
}

async function write(
  rpc: Rpc,
  call: ServerReadableStream<unknown, unknown>,
  request_id: string,
  { presence, state, clientOf, machineHeader }: Services,
): Promise<unknown> {
  const gone = new AbortController();
  call.once('cancelled', () =>
    gone.abort(new AppError('unavailable', 'the broker that sends the file has ended the call')),
  );
  const { key } = await clientOf(call.metadata);
  const machine = machineIds.parse(String(call.metadata.get(machineHeader)[0] ?? ''));
  const rights = rightsOf(state, key.id);
  if (!rights.may('files:write') || !rights.reaches(machine))
    throw new AppError('forbidden', `this key is not allowed to write on machine ${machine}`, {
      machine_id: machine,
    });
  const { stub } = presence.get(machine);
  const caller = { key_id: key.id, key_name: key.name };
  const options: CallOptions = { request_id, caller, signal: gone.signal, lane: 'bulk' };
  // The cast is safe: the server decodes the messages of `call` as messages of `rpc`, and stub[rpc] takes these.
  return await (stub[rpc] as unknown as Write)(call, options);
}
