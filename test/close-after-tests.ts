// Closes the resources of a test at its end, and resources that the tests of a file share after the last of
// them.
import { afterAll, onTestFinished } from 'vitest';

type Close = () => unknown;

/** Functions that close the shared resource that is being created; undefined at other times. */
let ofFile: Close[] | undefined;

/**
 * Calls `close` at the end of the test, or after the last test if a shared resource is being created. The
 * function added last is called first.
 */
export function atEnd(close: Close): void {
  if (ofFile) ofFile.push(close);
  else onTestFinished(async () => void (await close()));
}

/**
 * Creates a resource once for all tests of a file, when the first of them needs it. Tests must leave it as
 * they found it.
 */
export function shared<T>(make: () => Promise<T>): () => Promise<T> {
  const closers: Close[] = [];
  let made: Promise<T> | undefined;
  afterAll(async () => {
    for (const close of closers.reverse()) await close();
  });
  const makeNow = async (): Promise<T> => {
    ofFile = closers;
    try {
      return await make();
    } finally {
      ofFile = undefined;
    }
  };
  return () => (made ??= makeNow());
}
