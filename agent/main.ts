#!/usr/bin/env node
// The program farhand-agent: runs a subcommand such as `doctor`, or else the agent itself (`start.ts`).
import { createLogger, isJournal } from '../shared/logger.ts';
import { hideArgument } from '../shared/program-start-and-end.ts';
import { readSettings, type Settings } from '../shared/read-settings.ts';
import { type RunContext, runServiceProgram } from '../shared/run-service-program.ts';
import { linkText } from '../shared/systemd/link-status-text.ts';
import { agentSettings } from './settings-schema.ts';
import { type Agent, startAgent } from './start.ts';

const name = 'farhand-agent';
/** The settings file of the service. The systemd unit farhand-agent-upgrade, which runs as root, reads it too. */
const settingsFile = '/etc/farhand/agent.toml';

runServiceProgram({
  name,
  summary: 'connects this machine to a broker',
  settings: agentSettings,
  verbsHelp: `To find problems: ${name} doctor.\nTo accept signed upgrades: ${name} trust-key FILE.\n`,
  checkArguments: () => hideArgument('--join-token'),
  loadServiceVerbs: () => import('./systemd-service.ts'),
  verbs: {
    async doctor(from) {
      const { doctor } = await import('./doctor.ts');
      return doctor(from);
    },
    async 'trust-key'({ argv }) {
      const { trustKey } = await import('./upgrade/trusted-key.ts');
      return { text: await trustKey(argv), code: 0 };
    },
    async 'apply-upgrade'({ env }) {
      const { applyUpgrade } = await import('./upgrade/root-unit/apply-upgrade.ts');
      const settings = readSettings(agentSettings, { argv: ['--config', settingsFile], env: {} });
      await applyUpgrade(settings, createLogger(name, settings.log_level, isJournal(env)));
      return { text: '', code: 0 };
    },
  },
  service(from) {
    const settings = readSettings(agentSettings, from);
    return { log_level: settings.log_level, start: (context) => start(settings, context) };
  },
});

/** Starts the agent. The returned function closes it. */
function start(settings: Settings<typeof agentSettings>, { log, notify, fail }: RunContext) {
  let agent: Agent | undefined;
  async function run(): Promise<void> {
    agent = await startAgent(settings, log, (linked, broker) => {
      const text = linkText(broker, linked ? agent?.machineId : undefined);
      notify.up(text, () => agent?.alive() ?? true);
    });
    await agent.ended;
  }
  run().then(() => process.exit(0), fail);
  // An agent that has not started yet has nothing to close: it is still trying to join a broker.
  return async () => agent?.close();
}
