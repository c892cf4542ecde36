// Closes the resources of a test at its end, and those shared by a file's tests after the last test.
import { afterAll, onTestFinished } from 'vitest';

type Close = () => unknown;

/** Functions that close what is shared by all tests of a file. */
let ofFile: Close[] | undefined;

/** The function added last is called first. */
export function atEnd(close: Close): void {
  if (ofFile) ofFile.push(close);
  else onTestFinished(async () => void (await close()));
}

/**
 * Creates a resource once for all tests of a file, when the first test needs it. No test may leave it
 * changed.
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
