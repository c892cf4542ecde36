// How the CLI speaks: text for people, JSON for programs.

export type Format = 'text' | 'json';

/** Prints a result: as JSON whole, else the lines a person wants. */
export function print(format: Format, result: unknown, lines: () => string[]): void {
  process.stdout.write(
    format === 'json' ? `${JSON.stringify(result, null, 2)}\n` : `${lines().join('\n')}\n`,
  );
}
