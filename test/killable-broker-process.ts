// A broker in a separate process, with a clock that the test moves. The test starts it with fork().
import { brokerSettings } from '../broker/settings-schema.ts';
import { startBroker, type Tuning } from '../broker/start/index.ts';
import { createLogger } from '../shared/logger.ts';
import { readSettings } from '../shared/read-settings.ts';
import { startLeapingClock } from './leaping-clock.ts';

/** The only argument of the process, as JSON. */
export interface BrokerProcessOptions {
  flags: string[];
  alerts: NonNullable<Tuning['alerts']>;
  /** Milliseconds by which the clock is ahead of the real one. */
  ahead: number;
}

const { flags, alerts, ahead } = JSON.parse(process.argv[2] ?? '') as BrokerProcessOptions;
const clock = startLeapingClock();
clock.leap(ahead);
process.on('message', (ms: number) => {
  clock.leap(ms);
  process.send?.('leapt');
});
const level = process.env.TEST_LOG === 'debug' ? 'debug' : 'silent';
const settings = readSettings(brokerSettings, { argv: flags, env: {} });
await startBroker(settings, createLogger('broker', level), { alerts });
process.send?.('started');
