// The tree of verbs. Of its rooms only the one at hand is loaded, for a command line must be quick.
import { Command } from 'commander';
import { version } from '../../shared/version.ts';

type Add = (program: Command) => void;

const rooms: Readonly<Record<string, () => Promise<Add>>> = {
  login: async () => (await import('./login.ts')).addLogin,
  logout: async () => (await import('./login.ts')).addLogout,
  whoami: async () => (await import('./login.ts')).addWhoami,
  exec: async () => (await import('./exec/index.ts')).addExec,
  shell: async () => (await import('./shell.ts')).addShell,
  files: async () => (await import('./files/index.ts')).addFiles,
  machines: async () => (await import('./machines.ts')).addMachines,
  commands: async () => (await import('./commands.ts')).addCommands,
  batches: async () => (await import('./commands.ts')).addBatches,
  sessions: async () => (await import('./sessions.ts')).addSessions,
  schedules: async () => (await import('./schedules.ts')).addSchedules,
  webhooks: async () => (await import('./webhooks.ts')).addWebhooks,
  events: async () => (await import('./events.ts')).addEvents,
  audit: async () => (await import('./events.ts')).addAudit,
  auth: async () => (await import('./auth.ts')).addAuth,
  'join-tokens': async () => (await import('./join-tokens.ts')).addJoinTokens,
  broker: async () => (await import('./broker.ts')).addBroker,
  doctor: async () => (await import('./doctor/index.ts')).addDoctor,
};

/** The whole tree, or with a noun only what is needed for it. */
export async function openTree(noun?: string): Promise<Command> {
  const program = new Command('farhand')
    .description('Remote machines from the command line.')
    .version(version)
    .showHelpAfterError('See farhand --help.')
    .addHelpText('after', `\n${where}`)
    .exitOverride();
  const only = noun !== undefined && Object.hasOwn(rooms, noun) ? rooms[noun] : undefined;
  const adds = await Promise.all((only ? [only] : Object.values(rooms)).map((load) => load()));
  for (const add of adds) add(program);
  return program;
}

const where = `The broker is the one of farhand login; FARHAND_URL and FARHAND_API_KEY outweigh that. On the broker's own
box --data-dir DIR needs neither. FARHAND_PIN=sha256//… or FARHAND_CA=FILE tell how its certificate is known.
Ends with 0, 1 where something failed, 2 for wrong usage, 78 for bad configuration.`;
