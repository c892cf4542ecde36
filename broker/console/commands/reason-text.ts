// The codes in the field `reason` of commands and of runs of schedules, as sentences.

const texts: Readonly<Record<string, string>> = {
  queue_expired: 'The machine was not ready in time.',
  machine_offline: 'The machine was offline.',
  machine_removed: 'The machine was removed.',
  max_failures: 'Too many machines of the batch had failed.',
  key_revoked: 'The key that created the command was revoked.',
  no_spec: 'The command did not run, because its command line is no longer stored.',
  unknown_id: 'The agent did not receive the command.',
  dropped: 'The connection to the machine broke before the command began.',
  agent_restarted: 'The agent restarted before the command ended.',
  spawner_died: 'The agent’s process that starts commands died, so the command was killed.',
  no_report: 'The agent never reported how the command ended.',
  bad_report: 'The report of the agent was invalid.',
  forgotten: 'The agent no longer has the result of the command.',
};

/** Returns a reason as a sentence. A reason that is a sentence already is returned as it is. */
export const reasonText = (reason: string): string => texts[reason] ?? reason;
