// A client in another language: Python's gRPC with the code that protoc generates from client.proto, with a
// real broker and agent.
import { execFile } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { caOf } from '../grpc-fixture.ts';
import { startFarhand } from '../start-farhand.ts';
import { generatePython, lacksPython, python } from './python-grpc.ts';

/** Debian packages: python3-grpcio, protobuf-compiler and protobuf-compiler-grpc. */
test.skipIf(lacksPython('grpc'))(
  'a program in Python does everything with client.proto alone (skipped where python3-grpcio, protoc or its plugin is missing)',
  async () => {
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent();
    const { session_id } = await system.client.sessions.create({ machine_id, shell: '/bin/sh' });
    const folder = generatePython('client/v1/client.proto');
    const ca = join(folder, 'ca.pem');
    writeFileSync(ca, await caOf(system));
    const path = join(folder, 'file');
    const script = join(import.meta.dirname, 'grpc-client.py');
    const args = [script, folder, system.grpc, ca, system.key, machine_id, session_id, path];
    const { stdout } = await promisify(execFile)(python, args, { timeout: 15_000 });
    expect(JSON.parse(stdout)).toEqual({
      exec: [true, 'done\n', 'failed', 3],
      follow: ['over ', 'failed'],
      events: [
        ['command.started', true],
        ['command.failed', true],
      ],
      write: [1_400_000, true],
      read: [100, true],
      attach: [true, 5],
      refused: ['NOT_FOUND', 'file_not_found', `${path}.not`],
    });
  },
);
