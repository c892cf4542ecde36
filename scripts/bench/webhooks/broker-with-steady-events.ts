// A broker that emits invented events at a steady rate after SIGUSR2. A bench has too few machines to cause events at
// this rate.

import type { Events } from '../../../broker/event-log.ts';
import type { History } from '../../../broker/history/history-database.ts';
import { brokerSettings } from '../../../broker/settings-schema.ts';
import { startBroker } from '../../../broker/start/index.ts';
import { createLogger } from '../../../shared/logger.ts';
import { readSettings } from '../../../shared/read-settings.ts';

const [rate = '', seconds = '', ...argv] = process.argv.slice(2);
const machine = { id: 'mach_0000000000000000000000', name: 'web-1' };
const tickMs = 10;

/** Data of an event about a command, of typical length. */
const data = {
  command_id: 'cmd_0000000000000000000000',
  command: `sh -c ${'x'.repeat(200)}`,
  status: 'completed',
  exit_code: 0,
  duration: 12,
  schedule_id: null,
};

let rooms: { history: History; events: Events } | undefined;

function emit(): void {
  const begun = performance.now();
  let received = 0;
  const timer = setInterval(() => {
    const due = Math.min(Number(rate) * Number(seconds), ((performance.now() - begun) / 1000) * Number(rate));
    for (; received < due; received += 1) {
      // Each event has a transaction of its own, as in normal operation.
      void rooms?.history.write((journal) => rooms?.events.emit(journal, 'command.completed', machine, data));
    }
    if (received >= Number(rate) * Number(seconds)) clearInterval(timer);
  }, tickMs);
}

process.once('SIGUSR2', emit);
await startBroker(readSettings(brokerSettings, { argv, env: {} }), createLogger('farhand-broker', 'info'), {
  onStores(given) {
    rooms = given;
  },
});
