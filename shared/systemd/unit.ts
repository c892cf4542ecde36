// The text of a unit: what every service of ours has, and what its program adds.

export interface UnitWish {
  description: string;
  /** Program and arguments; the first is an absolute path. */
  command: readonly string[];
  user: string;
  /** Below /var/lib. */
  state: string;
  /** Of the systemd that will read it. */
  systemd: number;
  /** Lines of [Service] that only this program has. */
  lines: readonly string[];
}

/** A unit that tells systemd how it is, and comes back by itself unless its configuration is bad. */
export function unitText({ description, command, user, state, systemd, lines }: UnitWish): string {
  return `[Unit]
Description=${description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=${command.map(quoted).join(' ')}
User=${user}
StateDirectory=${state}
StateDirectoryMode=0700
WatchdogSec=60
# No core file: its memory holds secrets.
WatchdogSignal=SIGKILL
TimeoutStartSec=180
TimeoutStopSec=20
Restart=always
RestartSec=2
${systemd >= 254 ? 'RestartSteps=5\nRestartMaxDelaySec=60\n' : ''}# Bad configuration, or a machine that its broker has removed: starting it again would not help.
RestartPreventExitStatus=78
# The program ends its own children in order; systemd kills what is left.
KillMode=mixed
${lines.join('\n')}

[Install]
WantedBy=multi-user.target
`;
}

/** A word of a command line as systemd reads it. */
function quoted(word: string): string {
  const plain = word.replaceAll('%', '%%').replaceAll('$', '$$$$');
  return /^[\w@%+=:,./$-]+$/.test(plain) ? plain : `"${plain.replace(/[\\"]/g, '\\$&')}"`;
}
