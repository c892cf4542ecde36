// What both programs can do about their service: three verbs, each with its settings and its deed.
import { existsSync } from 'node:fs';
import { givenSettings, helpText, type Invocation, readSettings, type Setting } from '../settings.ts';
import { report, type Service, type State, settingsOf } from './index.ts';
import { reportText, statusSettings } from './report.ts';
import type { Verb } from './verbs.ts';

export interface Deed {
  purpose: string;
  settings: Record<string, Setting>;
  /** Does it and says so; the result is the exit code. */
  run(from: Invocation): Promise<number>;
}

export async function perform(
  { name }: Service,
  verb: Verb,
  deeds: Record<Verb, Deed>,
  from: Invocation,
): Promise<number> {
  const { purpose, settings, run } = deeds[verb];
  if (!from.argv.includes('--help')) return await run(from);
  process.stdout.write(helpText(`${name} ${verb}`, purpose, settings));
  return 0;
}

/** `settled`: whether it has come as far as it should; `more`: what only this program can tell. */
export function statusOf(
  service: Service,
  settled: (state: State) => boolean,
  more: (state: State) => Record<string, unknown> = () => ({}),
): Deed {
  return {
    purpose: 'tells how the service is; exits with 0 while it runs, with 3 else',
    settings: statusSettings,
    async run(from) {
      const { output } = readSettings(statusSettings, from);
      const found = await report(service, settled);
      say(reportText(service.name, found, more(found), output));
      return found.active === 'active' ? 0 : 3;
    },
  };
}

/** What an earlier install was told counts, setting by setting, unless it is told anew. */
export function gathered(
  service: Service,
  table: Record<string, Setting>,
  from: Invocation,
): Record<string, unknown> {
  const file = settingsOf(service);
  const old = existsSync(file) ? givenSettings(table, { argv: ['--config', file], env: {} }) : {};
  const { config: _, ...given } = { ...old, ...givenSettings(table, from) };
  return given;
}

export function say(...lines: string[]): void {
  process.stdout.write(lines.map((line) => (line.endsWith('\n') ? line : `${line}\n`)).join(''));
}
