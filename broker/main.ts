#!/usr/bin/env node
// The program farhand-broker: its command line and its verbs. The code in start/ starts the broker itself.
import { fstatSync } from 'node:fs';
import { readSettings } from '../shared/read-settings.ts';
import { type RunContext, runServiceProgram } from '../shared/run-service-program.ts';
import { type BrokerSettings, brokerSettings, refusePasswordIn } from './settings-schema.ts';
import { startBroker } from './start/index.ts';

const name = 'farhand-broker';

runServiceProgram({
  name,
  summary: 'the server that agents and API clients connect to',
  settings: brokerSettings,
  verbsHelp: `To find problems: ${name} doctor. To move the broker’s data to PostgreSQL, or back to files: ${name} migrate --help.\nTo add a broker to the same database: ${name} cluster --help.\n`,
  checkArguments: refusePasswordIn,
  loadServiceVerbs: () => import('./systemd-service.ts'),
  verbs: {
    async doctor(from) {
      const { doctor } = await import('./doctor.ts');
      return doctor(from);
    },
    async migrate(from) {
      const { migrate } = await import('./migrate/index.ts');
      await migrate(from, (line) => void process.stdout.write(`${line}\n`));
      return { text: '', code: 0 };
    },
    async cluster(from) {
      const { cluster } = await import('./cluster/token-and-join-verbs.ts');
      return { text: await cluster(from), code: 0 };
    },
  },
  service(from) {
    const settings = readSettings(brokerSettings, from);
    return { log_level: settings.log_level, start: (context) => start(settings, context) };
  },
});

/** Starts the broker. The returned function waits until the broker has started, then closes it. */
function start(settings: BrokerSettings, { log, notify, fail }: RunContext): () => Promise<void> {
  const starting = startBroker(settings, log);
  if (settings.local) endWithStarter();
  starting.then((broker) => {
    if (settings.local) process.stdout.write(`${broker.socket}\n`);
    const agents = broker.grpc === undefined ? 'not listening for agents' : `agents on ${broker.grpc}`;
    broker.failed.catch(fail);
    notify.up(`REST on ${broker.url ?? broker.socket}, ${agents}`, broker.alive);
  }, fail);
  return async () => (await starting).close();
}

/**
 * Ends this broker when the `farhand` that started it ends, even if it was killed. Otherwise this broker would keep the
 * data directory, and the service could not start. `farhand` holds the other end of standard input, a socket.
 */
function endWithStarter(): void {
  if (!fstatSync(0).isSocket()) return;
  process.stdin.on('error', () => {}).on('close', () => process.kill(process.pid, 'SIGTERM'));
  process.stdin.resume();
}
