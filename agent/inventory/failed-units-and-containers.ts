// Lists failed systemd units, and containers of Docker and Podman if the agent may use their sockets.
import { constants } from 'node:fs/promises';
import { request } from 'node:http';
import type { InventoryContainer } from '../../proto/types/farhand/agent/v1/InventoryContainer.ts';
import type { InventoryUnit } from '../../proto/types/farhand/agent/v1/InventoryUnit.ts';
import { after } from '../../shared/clock.ts';
import { exists } from './packages-and-updates.ts';
import { PartFailed, runProgram } from './run-program.ts';

export async function readFailedUnits(signal: AbortSignal): Promise<InventoryUnit[]> {
  if (!(await exists('/run/systemd/system'))) return [];
  const args = ['list-units', '--state=failed', '--all', '--full', '--plain', '--no-legend', '--no-pager'];
  return parseUnits(await runProgram('systemctl', args, { signal }));
}

/** Parses lines with these columns: unit, load state, active state, sub-state, description. */
export function parseUnits(text: string): InventoryUnit[] {
  return [...text.matchAll(/^\s*(\S+)\s+\S+\s+\S+\s+\S+[ ]*(.*)$/gm)].map(
    ([, name = '', description = '']) => ({
      name,
      description,
    }),
  );
}

const sockets = ['/run/docker.sock', '/var/run/docker.sock', '/run/podman/podman.sock'];
/** Milliseconds in which a container engine (Docker or Podman) must answer. */
const answerMs = 10_000;
const mostAnswer = 4 * 1024 * 1024;

/**
 * Lists the containers of each Docker or Podman socket that the agent's user may use. Throws PartFailed if an engine
 * does not answer.
 */
export async function readContainers(paths: readonly string[] = sockets): Promise<InventoryContainer[]> {
  const found = new Map<string, InventoryContainer>();
  for (const path of paths) {
    const isUsable = await exists(path, constants.R_OK | constants.W_OK);
    // Containers are stored by id, because two socket paths may lead to the same container engine.
    if (isUsable) for (const one of parseContainers(await askEngine(path))) found.set(one.id ?? '', one);
  }
  return [...found.values()];
}

/** Sends a request that the APIs of both Docker and Podman understand. */
function askEngine(socketPath: string): Promise<string> {
  const { promise, resolve, reject } = Promise.withResolvers<string>();
  const fail = (reason: string): void => reject(new PartFailed(`${socketPath} ${reason}`));
  const asked = request({ socketPath, path: '/containers/json?all=1', headers: { Host: 'localhost' } });
  asked.on('error', () => fail('does not answer'));
  asked.on('response', (response) => {
    if (response.statusCode !== 200) fail(`answered with status ${response.statusCode}`);
    let text = '';
    response.setEncoding('utf8').on('data', (part: string) => {
      text += part;
      if (text.length > mostAnswer) fail(`answered with more than ${mostAnswer} bytes`);
    });
    response.on('error', () => fail('closed the connection in the middle of its answer'));
    response.on('end', () => resolve(text));
  });
  asked.end();
  const cancelTimeout = after(answerMs, () => fail(`did not answer within ${answerMs / 1000} s`));
  return promise.finally(() => {
    cancelTimeout();
    asked.destroy();
  });
}

const text = (value: unknown): string => (typeof value === 'string' ? value : '');

function parseContainers(json: string): InventoryContainer[] {
  const list: unknown = JSON.parse(json);
  if (!Array.isArray(list))
    throw new PartFailed('the container engine (Docker or Podman) did not answer with a list of containers');
  return list.map((one: Record<string, unknown> | null) => ({
    id: text(one?.Id).slice(0, 12),
    name: text(Array.isArray(one?.Names) ? one.Names[0] : '').replace(/^\//, ''),
    image: text(one?.Image),
    state: text(one?.State),
  }));
}
