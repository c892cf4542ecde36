// The text about its link that an agent reports to systemd, and that `farhand-agent status` parses.

/** Returns an agent's text for `systemctl status`. `machineId`: undefined while the agent is not linked. */
export function linkText(broker: string, machineId: string | undefined): string {
  return machineId ? `linked to ${broker} as ${machineId}` : `not linked to ${broker}, trying`;
}

export interface LinkState {
  broker: string;
  machineId: string | undefined;
}

/** Parses a status text of linkText(); undefined for any other text. */
export function linkIn(text: string): LinkState | undefined {
  const [, broker, machineId] = /^(?:not )?linked to (\S+?)(?: as (\S+)|, trying)$/.exec(text) ?? [];
  return broker ? { broker, machineId } : undefined;
}
