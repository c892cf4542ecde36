// REST routes of upgrades, which install another version of the agent on many machines, a wave at a time.
import * as z from 'zod';
import { mostMachines, mustNameOne, namesOne, target } from './batches.ts';
import { requestedBy } from './commands.ts';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { day, machineId, milliseconds, named, timestamp, upgradeId } from './shared-schemas.ts';

const agentVersion = z
  .string()
  .regex(/^\d{1,9}\.\d{1,9}\.\d{1,9}(-[0-9A-Za-z.-]{1,64})?$/, 'must be a version such as 1.2.3')
  .meta({ description: 'Version of the agent', examples: ['1.2.3'] });

/** Reasons why a machine cannot be upgraded, as far as the broker can see without asking the agent. */
export const obstacles = [
  'current',
  'held',
  'pinned',
  'not_supported',
  'not_allowed',
  'no_key',
  'no_package',
  'other_key',
] as const;
export type Obstacle = (typeof obstacles)[number];

const reasons = [
  ...obstacles,
  'in_other_upgrade',
  'offline',
  'busy',
  'not_permitted',
  'removed',
  'refused',
  'rolled_back',
  'no_answer',
  'max_failures',
] as const;
export type UpgradeReason = (typeof reasons)[number];

const machineStatuses = [
  'waiting',
  'offline',
  'staging',
  'busy',
  'switching',
  'upgraded',
  'failed',
  'skipped',
  'cancelled',
] as const;
export type MachineUpgradeStatus = (typeof machineStatuses)[number];

export const upgradeOutcomes = ['running', 'succeeded', 'rolled_back', 'failed'] as const;

const lastUpgrade = z.object({
  upgrade_id: z.string().describe('Id of the upgrade; empty for an upgrade by hand'),
  outcome: z
    .enum(upgradeOutcomes)
    .describe(
      '`running`: the new version is being tried; `rolled_back`: it was tried, and the old one runs again; `failed`: the package was refused, or the old version could not be restored',
    ),
  from_version: z.string().describe('Version before the upgrade'),
  to_version: z.string().describe('Version that the upgrade was to install'),
  reason: z.string().describe('Why the upgrade failed or was rolled back; empty otherwise'),
});

/** Field of a machine that says whether its agent can be upgraded. */
export const machineUpgrade = named('MachineUpgradeState', {
  available: z
    .string()
    .nullable()
    .describe(
      'Version that an upgrade would install now; null if there is none, or if the machine has that version already',
    ),
  possible: z.boolean().describe('True if an upgrade can install the version `available` on the machine'),
  reason: z.enum(obstacles).nullable().describe('Why the machine cannot be upgraded; null if it can'),
  message: z.string().nullable().describe('The reason in words, with the next step'),
  pin: z
    .string()
    .nullable()
    .describe('The only version that upgrades may install, set by agent_pin; null: any'),
  hold: z.boolean().describe('True if upgrades skip the machine'),
  kind: z
    .enum(['tar.gz', 'deb'])
    .nullable()
    .describe(
      'Kind of package by which upgrades replace the agent. Null: the agent can be replaced only by hand, or has not reported how it is installed',
    ),
  key: z
    .string()
    .nullable()
    .describe(
      'Fingerprint of the signing key that the machine trusts. The machine accepts only packages that were signed with this key, or with a newer key that this key has signed. Null: the machine trusts no key',
    ),
  hold_version: z
    .string()
    .nullable()
    .describe('The only version that the machine’s owner accepts; null: any'),
  last: lastUpgrade.nullable().describe('The last upgrade of the machine, as its agent reported it'),
});

const counts = z.object({
  waiting: z
    .number()
    .describe('Number of machines whose wave has not begun, or that wait for their turn in it'),
  offline: z
    .number()
    .describe(
      'Number of machines that are offline although their wave has begun. Each is upgraded if it is online again within `queue_for`, and skipped otherwise',
    ),
  staging: z.number().describe('Number of machines to which the package is being sent'),
  busy: z
    .number()
    .describe('Number of machines that have the package and wait until their commands and terminals end'),
  switching: z.number().describe('Number of machines that are starting the new version'),
  upgraded: z.number().describe('Number of machines that run the new version'),
  failed: z.number().describe('Number of machines whose upgrade failed'),
  skipped: z
    .number()
    .describe('Number of machines that were skipped, such as offline machines and machines on hold'),
  cancelled: z
    .number()
    .describe('Number of machines that still had the old version when the upgrade was cancelled or failed'),
});

const wave = z
  .string()
  .regex(
    /^([1-9]\d{0,4}|([1-9]\d?|100)%)$/,
    'must be a number of machines such as 5, or a percentage such as 10%',
  )
  .meta({ examples: ['10%', '5'] });

/** The options that a request to start an upgrade can set. */
const choices = {
  wave: wave.describe('Machines of one wave: a number, or a percentage of all'),
  pause: milliseconds(0, 7 * day).describe('Milliseconds between the end of a wave and the next one'),
  max_failures: z
    .int()
    .min(0)
    .max(mostMachines)
    .describe('The upgrade stops when more machines than this number have failed'),
  running: z
    .enum(['wait', 'end'])
    .describe('What happens to running commands and terminals: `wait` for their end, or `end` them'),
  wait_for: milliseconds(0, 7 * day).describe(
    'With `running: wait`, milliseconds after which a machine that is still busy is skipped',
  ),
  queue_for: milliseconds(0, 30 * day).describe(
    'Milliseconds for which a machine may be offline after its wave has begun; then it is skipped. Other machines do not wait for it',
  ),
  probe_timeout: milliseconds(10_000, 3_600_000).describe(
    'Milliseconds in which the new agent must connect; otherwise the machine goes back to the old one',
  ),
};
const plan = {
  wave: choices.wave.default('10%'),
  pause: choices.pause.default(60_000),
  max_failures: choices.max_failures.default(0),
  running: choices.running.default('wait'),
  wait_for: choices.wait_for.default(3_600_000),
  queue_for: choices.queue_for.default(3_600_000),
  probe_timeout: choices.probe_timeout.default(120_000),
};

/**
 * The condition under which some fields are null. Their values would reveal the number of the upgrade's machines that
 * the key may not use.
 */
const forLimited = 'the upgrade has machines that the key may not use';
const nullForLimited = `null if ${forLimited}`;

const upgrade = named('Upgrade', {
  id: upgradeId,
  status: z
    .enum(['running', 'completed', 'failed', 'cancelled'])
    .describe(
      '`completed`: all machines are done and none failed; `failed`: at least one machine failed. Machines that the key may not use are included',
    ),
  version: z.string().describe('Version that the machines get'),
  ...choices,
  current_wave: z
    .number()
    .nullable()
    .describe(`Number of the last wave that has begun, from 1; ${nullForLimited}`),
  waves: z.number().nullable().describe(`Number of waves; ${nullForLimited}`),
  next_wave_at: timestamp
    .nullable()
    .describe(
      `Time at which the next wave begins. Null if the current wave has not ended, if there is no next wave, or if ${forLimited}`,
    ),
  total: z.number().describe('Number of machines of the upgrade'),
  counts: counts.describe('Number of machines by status'),
  created_at: timestamp.describe('Time of creation'),
  finished_at: timestamp.nullable().describe('Time at which the last machine was done; null before that'),
  requested_by: requestedBy,
});

const upgradeMachine = named('UpgradeMachine', {
  machine_id: machineId,
  machine_name: z.string().describe('Name of the machine; empty if it was removed'),
  wave: z.number().nullable().describe(`Number of the machine’s wave, from 1; ${nullForLimited}`),
  status: z
    .enum(machineStatuses)
    .describe('Status; `upgraded`, `failed`, `skipped` and `cancelled` are final'),
  reason: z
    .enum(reasons)
    .nullable()
    .describe('Why the upgrade of the machine was skipped, failed or was cancelled'),
  message: z.string().nullable().describe('The reason in words, with the next step'),
  from_version: z.string().describe('Version before the upgrade; empty if unknown'),
  commands: z
    .number()
    .nullable()
    .describe('Number of running commands and terminals that must end before a `busy` machine is upgraded'),
  created_at: timestamp.describe('Time of creation'),
  started_at: timestamp
    .nullable()
    .describe('Time at which the transfer of the package began for the first time; null before that'),
  finished_at: timestamp
    .nullable()
    .describe('Time at which the machine’s status became final; null before that'),
});

export const upgrades = {
  create: single('POST', '/machines/upgrade', 'machines:write', {
    summary: 'Upgrade the agents of many machines, a wave at a time',
    description:
      'Takes either `machine_ids` or `tags`. Answers before any machine is upgraded; follow the upgrade by `GET /upgrades/{upgrade_id}` or the events `upgrade.*`. An older `version` can be installed too.',
    body: z
      .strictObject({
        ...target,
        version: agentVersion.optional().describe('Version to install; default: the version of the broker'),
        ...plan,
      })
      .refine(namesOne, mustNameOne),
    example: { tags: ['web'], wave: '10%', max_failures: 1 },
    reply: upgrade,
    status: 201,
    idempotency: 'replay',
  }),
  list: list('/upgrades', 'machines:read', {
    summary: 'List upgrades of agents',
    query: { machine_id: machineId.optional().describe('Only upgrades that include this machine') },
    sort: ['created_at'],
    fields: upgrade.pick({ id: true, status: true }),
    reply: upgrade,
  }),
  get: single('GET', '/upgrades/{upgrade_id}', 'machines:read', {
    summary: 'Get an upgrade and its progress',
    reply: upgrade,
  }),
  machines: list('/upgrades/{upgrade_id}/machines', 'machines:read', {
    summary: 'List the machines of an upgrade with their progress',
    sort: ['wave', 'created_at'],
    fields: upgradeMachine.pick({ machine_id: true, status: true, reason: true }),
    reply: upgradeMachine,
  }),
  cancel: single('POST', '/upgrades/{upgrade_id}/cancel', 'machines:write', {
    summary: 'Cancel an upgrade',
    description:
      'Machines that still wait or are receiving the package are not upgraded. The upgrade of a machine that is already starting the new version continues.',
    reply: upgrade,
  }),
};

/** Fields of `PATCH /machines/{machine_id}` that limit the upgrades of one machine. */
export const upgradePolicy = {
  agent_pin: agentVersion
    .nullable()
    .optional()
    .describe('The only version of the agent that upgrades may install; null: any'),
  agent_hold: z.boolean().optional().describe('True: upgrades skip the machine'),
};
