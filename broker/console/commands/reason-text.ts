// The codes in the field `reason` of commands and of runs of schedules, as sentences.

const texts: Readonly<Record<string, string>> = {
  queue_expired: 'The machine was not ready in time.',
  machine_offline: 'The machine was offline.',
  machine_removed: 'The machine was removed.',
  max_failures: 'Too many machines of the batch had failed.',
  key_revoked: 'The key that created it was revoked.',
  no_spec: 'The broker no longer has the command line.',
  unknown_id: 'The agent did not receive it.',
  dropped: 'The connection broke before it began.',
  agent_restarted: 'The agent restarted meanwhile.',
  spawner_died: 'The process of the agent that starts commands ended.',
  no_report: 'The agent never reported how it ended.',
  bad_report: 'The report of the agent was invalid.',
  forgotten: 'The agent no longer has its result.',
};

/** Returns a reason as a sentence. A reason that is a sentence already is returned as it is. */
export const reasonText = (reason: string): string => texts[reason] ?? reason;
