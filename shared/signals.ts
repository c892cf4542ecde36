// The signals that clients may send by name, such as SIGINT, SIGTERM, SIGSTOP and SIGCONT.

/** Signals that the kernel sends for faults, such as SIGSEGV, are left out: they would look like crashes. */
export const signals = [
  'SIGHUP',
  'SIGINT',
  'SIGQUIT',
  'SIGUSR1',
  'SIGUSR2',
  'SIGTERM',
  'SIGKILL',
  'SIGSTOP',
  'SIGCONT',
  'SIGWINCH',
] as const;

export function isSignal(name: string): name is (typeof signals)[number] {
  return signals.some((one) => one === name);
}
