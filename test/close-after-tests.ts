// Closes the resources of a test at its end, and resources that the tests of a file share after the last of
// them.
import { onTestFinished } from 'vitest';

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

/** Functions that close the shared resources of the file whose tests run now. The one added last is called first. */
const ofAllShared: Close[] = [];

/**
 * Creates a resource once for all tests of a file, when the first of them needs it. Tests must leave it as
 * they found it. A module that several test files import may call this function: each file gets a resource of its own.
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

/** Closes the shared resources of a file. test/setup.ts calls this after the last test of each file. */
export async function closeShared(): Promise<void> {
  for (const close of ofAllShared.splice(0).reverse()) await close();
}
