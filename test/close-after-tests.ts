// Closes the resources of a test at its end, and those shared by a file's tests after the last test.
import { afterAll, onTestFinished } from 'vitest';

type Close = () => unknown;

/** Of what is being made for a whole file. */
let ofFile: Close[] | undefined;

/** The last comes first. */
export function atEnd(close: Close): void {
  if (ofFile) ofFile.push(close);
  else onTestFinished(async () => void (await close()));
}

/** Made once, when a test of the file first asks for it, for all of its tests: none may leave it otherwise than it was. */
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
