// Questions to a person; a program says its answers by flags.
import { clean } from '../../shared/clean.ts';
import { UsageError } from '../../shared/errors.ts';

/** Whether there is somebody to ask. */
export const attended = (): boolean => process.stdin.isTTY && process.stderr.isTTY;

/** Goes on only where it was said, by --yes or by a person. */
export async function demandYes(yes: boolean | undefined, what: string): Promise<void> {
  if (yes) return;
  if (!attended()) throw new UsageError(`this would ${what}; say --yes`);
  const { confirm } = await import('@clack/prompts');
  const answer = await confirm({
    message: clean(`This will ${what}. Go on?`),
    initialValue: false,
    output: screen(),
  });
  if (answer !== true) throw new UsageError('nothing was done');
}

export async function askText(message: string): Promise<string> {
  const { text } = await import('@clack/prompts');
  return answered(await text({ message, output: screen() }));
}

/** Does not show what is typed. */
export async function askSecret(message: string): Promise<string> {
  const { password } = await import('@clack/prompts');
  return answered(await password({ message, output: screen() }));
}

/** A terminal that does not know its width would get one character a line. */
function screen(): typeof process.stderr {
  process.stderr.columns ||= 80;
  return process.stderr;
}

function answered(answer: unknown): string {
  if (typeof answer === 'string' && answer !== '') return answer;
  throw new UsageError('no answer; nothing was done');
}
