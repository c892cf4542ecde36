// The verbs of farhand alerts, alert-rules, alert-channels and maintenance-windows.
import type { Command } from 'commander';
import { readInput } from './prompt.ts';
import { addDeliveries, receiverCells } from './shared-delivery-verbs.ts';
import { enabledOf, latest, ofMachine, routeVerb, since, warnOfSameName } from './verb-from-route.ts';

export function addAlerts(program: Command): void {
  const alerts = program.command('alerts').description('list and acknowledge alerts');
  routeVerb(alerts, 'list', 'alerts', 'list', {
    examples: ['--status open', '--machine web-1 --since 7d'],
    flags: {
      ...ofMachine,
      '--status <held|open|acknowledged|resolved>': 'only alerts with this status',
      '--rule <rule>': 'only alerts of this rule',
      ...since,
      ...latest,
    },
    view: { fields: 'id status message rule=name opened=created_at resolved=resolved_at' },
  });
  routeVerb(alerts, 'get', 'alerts', 'get');
  routeVerb(alerts, 'acknowledge', 'alerts', 'acknowledge', {
    examples: ['', '--note "the provider is on it"'],
    defaults: { acknowledged: true },
    flags: { '--note <text>': 'note to store with the acknowledgement, for other users' },
  });
}

/** Flags of both create and update. */
const flags = {
  '--above <value>': 'value above which an alert opens: percent, or the load average',
  '--recover <value>': 'value at which the alert resolves (default: 90 % of --above)',
  '--mount <path>':
    'mount point to watch with the kind disk, or "*" for the fullest file system that is not on a file server (default: /)',
  '--for <duration>':
    'how long the condition must last before an alert opens (default: 5m for the kinds offline, cpu, memory, disk and load; 0s for all others)',
  '--before <duration>': 'open the alert this long before the certificate or key expires (default: 14d)',
  '--machine <list>': 'machines that the rule applies to, comma-separated (default: all)',
  '--tags <list>': 'machines with any of these tags, comma-separated, in addition to those of --machine',
  '--repeat-every <duration>': 'send an alert again at this interval, until it is acknowledged or resolved',
  '--channel-ids <list>':
    'channels that get the alerts of this rule, comma-separated (default: all channels)',
};

export function addAlertRules(program: Command): void {
  const rules = program
    .command('alert-rules')
    .description('manage rules that open alerts; a rule is given by name or id');
  routeVerb(rules, 'list', 'alertRules', 'list', {
    defaults: { sort: 'name' },
    view: { fields: 'name id kind mount above recover for machines=machine_ids tags enabled' },
  });
  routeVerb(rules, 'get', 'alertRules', 'get');
  routeVerb(rules, 'create <name>', 'alertRules', 'create', {
    examples: [
      'away --kind offline --for 10m',
      '"disk is full" --kind disk --above 90 --mount "*" --tags web,db',
    ],
    flags: {
      '--kind <offline|cpu|memory|disk|load|schedule|agent_outdated|certificate|key>': 'what to watch',
      ...flags,
    },
    required: ['kind'],
    after: warnOfSameName('rule'),
  });
  routeVerb(rules, 'update', 'alertRules', 'update', {
    examples: ['--above 95 --repeat-every 1h', '--disable'],
    flags: {
      '--name <name>': 'name of the rule',
      ...flags,
      '--enable': 'evaluate the rule',
      '--disable': 'stop evaluating the rule, and resolve its alerts',
    },
    input: enabledOf,
  });
  routeVerb(rules, 'delete', 'alertRules', 'remove', { destroys: ['remove the alert rule', 'removed'] });
}

/** Flags of both create and update. No flag takes the secret as its value: other users can read command lines. */
const channelFlags = {
  '--user <name>': 'user of the mail server',
  '--from <address>': 'sender of e-mails',
  '--to <list>': 'recipients of e-mails, comma-separated',
  '--secret-stdin':
    'read a secret from standard input: the password of the mail server, the token of ntfy, or the key that signs deliveries',
};

export function addAlertChannels(program: Command): void {
  const channels = program
    .command('alert-channels')
    .description('manage the services that alerts are sent to; a channel is given by name or id');
  routeVerb(channels, 'list', 'alertChannels', 'list', {
    defaults: { sort: 'name' },
    view: {
      fields: 'name id type url enabled last',
      cells: receiverCells,
    },
  });
  routeVerb(channels, 'get', 'alertChannels', 'get');
  routeVerb(channels, 'create <name>', 'alertChannels', 'create', {
    examples: [
      'ops --type slack --url-stdin < url',
      'phone --type ntfy --url https://ntfy.sh/my-topic',
      'mail --type email --url smtps://mail.example.org --user me --secret-stdin --from a@example.org --to b@example.org < password',
    ],
    flags: {
      '--type <webhook|slack|discord|ntfy|email>': 'service that gets the alerts',
      '--url <url>': 'URL of the service, or smtps://HOST or smtp://HOST of a mail server',
      '--url-stdin':
        'read the URL from standard input, because URLs of Slack, Discord and ntfy are secrets; with --secret-stdin, the first line is the URL and the second line is the secret',
      ...channelFlags,
    },
    required: ['type'],
    input: secretsOf,
    after: warnOfSameName('channel'),
  });
  routeVerb(channels, 'update', 'alertChannels', 'update', {
    examples: ['--disable'],
    flags: {
      '--name <name>': 'name of the channel',
      '--url <url>': 'URL of the service, or of a mail server',
      '--url-stdin':
        'read the URL from standard input; with --secret-stdin, the first line is the URL and the second line is the secret',
      ...channelFlags,
      '--enable': 'send alerts',
      '--disable': 'send no alerts',
    },
    input: async (options) => ({ ...enabledOf(options), ...(await secretsOf(options)) }),
  });
  routeVerb(channels, 'delete', 'alertChannels', 'remove', { destroys: ['remove the channel', 'removed'] });
  addDeliveries(channels, 'alertChannels', {
    what: 'test',
    test: 'send a test message now, and fail if the service does not accept it',
    fields: 'id status attempts made=created_at next last',
  });
  routeVerb(channels, 'redeliver', 'alertChannels', 'redeliver', {
    text: ({ id, status }) => [`${id} ${status}`],
  });
}

/** Reads the URL, the secret or both from standard input. If both are read, the URL is the first line. */
async function secretsOf({ secretStdin, urlStdin }: Record<string, unknown>) {
  if (!secretStdin && !urlStdin) return {};
  const lines = (await readInput(8192, 'the URL and secret must be UTF-8 of at most 8 KiB')).split(/\r?\n/);
  return {
    ...(urlStdin ? { url: lines.shift() ?? '' } : {}),
    ...(secretStdin ? { secret: lines.shift() ?? '' } : {}),
  };
}

export function addMaintenanceWindows(program: Command): void {
  const windows = program
    .command('maintenance-windows')
    .description('manage maintenance windows; alerts are held back until the window ends');
  routeVerb(windows, 'list', 'maintenanceWindows', 'list', {
    defaults: { sort: 'name' },
    view: {
      fields:
        'name id machines=machine_ids tags cron start=starts_at end=ends_at active=active_until next=next_start',
    },
  });
  routeVerb(windows, 'get', 'maintenanceWindows', 'get');
  routeVerb(windows, 'create <name>', 'maintenanceWindows', 'create', {
    examples: [
      'reboot --machine web-1 --duration 30m',
      "updates --tags web --cron '0 3 * * sun' --timezone Europe/Berlin --duration 2h",
    ],
    flags: {
      '--machine <list>': 'machines of the window, comma-separated (default: all)',
      '--tags <list>': 'machines with any of these tags, comma-separated, in addition to those of --machine',
      '--starts-at <date>':
        'start of a window that takes place once, such as 2026-11-21T10:00:00Z (default: now)',
      '--ends-at <date>': 'end of a window that takes place once; --duration can be given instead',
      '--cron <expression>': 'start times of a window that takes place repeatedly, as a cron expression',
      '--timezone <zone>': 'time zone of --cron (default: UTC)',
      '--duration <duration>': 'how long the window lasts',
    },
    after: warnOfSameName('window'),
  });
  routeVerb(windows, 'delete', 'maintenanceWindows', 'remove', {
    destroys: ['remove the maintenance window', 'removed'],
  });
}
