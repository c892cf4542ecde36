// Stops waiting for a promise when a signal fires.

/**
 * Resolves or rejects as `work` does. Rejects with the signal's reason as soon as the signal fires; `work`
 * then continues, and its result is ignored.
 */
export async function unlessAborted<T>(signal: AbortSignal, work: Promise<T>): Promise<T> {
  const { promise: aborted, reject } = Promise.withResolvers<never>();
  const leave = (): void => reject(signal.reason);
  if (signal.aborted) leave();
  else signal.addEventListener('abort', leave, { once: true });
  try {
    return await Promise.race([aborted, work]);
  } finally {
    signal.removeEventListener('abort', leave);
  }
}
