// The text that an agent reports to systemd about its link to the broker. `farhand-agent status` parses this text.

/** Returns the agent's text for `systemctl status`. `machineId`: undefined while the agent is not linked. */
export function linkText(broker: string, machineId: string | undefined): string {
  return machineId ? `linked to ${broker} as ${machineId}` : `not linked to ${broker}, trying`;
}

export interface LinkState {
  broker: string;
  machineId: string | undefined;
}

/** Parses a text of linkText(). Returns undefined for any other text. */
export function linkIn(text: string): LinkState | undefined {
  const [, broker, machineId] = /^(?:not )?linked to (\S+?)(?: as (\S+)|, trying)$/.exec(text) ?? [];
  return broker ? { broker, machineId } : undefined;
}
