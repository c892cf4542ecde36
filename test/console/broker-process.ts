// A broker with a built console as a separate process, for tests that kill it with kill -9.
// Usage: broker-process.ts CONSOLE-FOLDER FLAG…
import { brokerSettings } from '../../broker/settings-schema.ts';
import { startBroker } from '../../broker/start/index.ts';
import { createLogger } from '../../shared/logger.ts';
import { readSettings } from '../../shared/read-settings.ts';

const [console, ...argv] = process.argv.slice(2);
const settings = readSettings(brokerSettings, { argv, env: {} });
await startBroker(settings, createLogger('broker', 'info'), console === undefined ? {} : { console });
