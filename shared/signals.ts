// The signals that may be asked for by name: those of a terminal or a service manager, and how to stop and go on.

/** The kernel's own would only look like crashes. */
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
