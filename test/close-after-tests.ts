// Closes the resources of a test at its end, and resources shared by the tests of a file after its last test.
import { onTestFinished } from 'vitest';

type Close = () => unknown;

/** Functions that close a shared resource. Collected while the resource is created, and undefined at other times. */
let ofFile: Close[] | undefined;

/**
 * Calls `close` at the end of the test. While a shared resource is being created, `close` belongs to this resource, and
 * is called after the last test of the file. The function added last is called first.
 */
export function atEnd(close: Close): void {
  if (ofFile) ofFile.push(close);
  else onTestFinished(async () => void (await close()));
}

/** Functions that close the shared resources of the current test file. The one added last is called first. */
const ofAllShared: Close[] = [];

/**
 * Returns a function that resolves with a resource, for all tests of a file. Its first call creates the resource. Tests
 * must leave the resource as they found it. A module that several test files import may call shared(): each file gets
 * its own resource.
 */
export function shared<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined;
  const makeNow = async (): Promise<T> => {
    const closers: Close[] = [];
    ofAllShared.push(async () => {
      made = undefined;
      for (const close of closers.reverse()) await close();
    });
    const before = ofFile;
    ofFile = closers;
    try {
      return await make();
    } finally {
      ofFile = before;
    }
  };
  return () => (made ??= makeNow());
}

/** Closes the shared resources of a file. test/setup.ts calls this function after the last test of each file. */
export async function closeShared(): Promise<void> {
  for (const close of ofAllShared.splice(0).reverse()) await close();
}
