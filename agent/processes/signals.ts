// The signals that may be asked for by name.

/** Those of a terminal or a service manager; the kernel's own would only look like crashes. */
const signals = [
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
] as const satisfies NodeJS.Signals[];

export function isSignal(name: string): name is (typeof signals)[number] {
  return signals.some((one) => one === name);
}
