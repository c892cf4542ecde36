// Builds the tree of the command line's verbs. For a fast start, only the module of the verb in use is
// loaded.
import { Command } from 'commander';
import { version } from '../../shared/version.ts';

type Add = (program: Command) => void;

const modules: Readonly<Record<string, () => Promise<Add>>> = {
  login: async () => (await import('./login.ts')).addLogin,
  logout: async () => (await import('./login.ts')).addLogout,
  whoami: async () => (await import('./login.ts')).addWhoami,
  exec: async () => (await import('./exec/index.ts')).addExec,
  shell: async () => (await import('./shell.ts')).addShell,
  files: async () => (await import('./files/index.ts')).addFiles,
  inventory: async () => (await import('./inventory.ts')).addInventory,
  machines: async () => (await import('./machines.ts')).addMachines,
  commands: async () => (await import('./commands-batches-sessions.ts')).addCommands,
  batches: async () => (await import('./commands-batches-sessions.ts')).addBatches,
  sessions: async () => (await import('./commands-batches-sessions.ts')).addSessions,
  schedules: async () => (await import('./schedules.ts')).addSchedules,
  'saved-commands': async () => (await import('./saved-commands.ts')).addSavedCommands,
  upgrades: async () => (await import('./upgrades.ts')).addUpgrades,
  packages: async () => (await import('./upgrades.ts')).addPackages,
  alerts: async () => (await import('./alerts.ts')).addAlerts,
  'alert-rules': async () => (await import('./alerts.ts')).addAlertRules,
  'alert-channels': async () => (await import('./alerts.ts')).addAlertChannels,
  'maintenance-windows': async () => (await import('./alerts.ts')).addMaintenanceWindows,
  webhooks: async () => (await import('./webhooks.ts')).addWebhooks,
  events: async () => (await import('./events-and-audit.ts')).addEvents,
  audit: async () => (await import('./events-and-audit.ts')).addAudit,
  auth: async () => (await import('./keys-and-join-tokens.ts')).addAuth,
  'join-tokens': async () => (await import('./keys-and-join-tokens.ts')).addJoinTokens,
  broker: async () => (await import('./broker.ts')).addBroker,
  doctor: async () => (await import('./doctor/index.ts')).addDoctor,
  completion: async () => (await import('./completion-scripts.ts')).addCompletion,
};
export const nouns = Object.keys(modules);

/** Creates the program with the verbs of one noun, or with all verbs if there is no such noun. */
export async function createProgram(noun?: string): Promise<Command> {
  const program = new Command('farhand')
    .description('Control remote machines from the command line.')
    .version(version)
    .addHelpText('after', `\n${notes}`)
    .configureOutput({ outputError: (text, write) => write(text.replace(/^error: /, 'farhand: ')) })
    .configureHelp({ optionDescription: ({ description }) => description })
    .exitOverride();
  const only = noun !== undefined && Object.hasOwn(modules, noun) ? modules[noun] : undefined;
  const adds = await Promise.all((only ? [only] : Object.values(modules)).map((load) => load()));
  for (const add of adds) add(program);
  pointToHelp(program, 'farhand');
  return program;
}

/** Makes a usage error point to the help of its own verb. */
function pointToHelp(command: Command, path: string): void {
  // Users often forget the "--" of `farhand exec`. Options of their command are then parsed as options of farhand.
  const hint =
    path === 'farhand exec' && !process.argv.includes('--')
      ? 'Put the command after "--", as in: farhand exec web-1 -- uname -a\n'
      : '';
  command.showHelpAfterError(`${hint}See ${path} --help.`);
  for (const one of command.commands) pointToHelp(one, `${path} ${one.name()}`);
}

const notes = `Commands go to the broker that farhand login has stored. FARHAND_URL and FARHAND_API_KEY override it. On the
broker's own machine, you can give --data-dir DIR instead. If no public authority issued the broker's
certificate, set FARHAND_PIN=sha256//… or FARHAND_CA=FILE.
Exit codes: 0 success, 1 failure, 2 wrong usage, 78 bad configuration.`;
