// The signals that clients of the API may send by name.

/**
 * The signals that a user may send to a command. SIGSEGV and similar ones are left out, because the command would seem
 * to have crashed.
 */
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
