// Creates manual pages from the help of the programs, and shell completions.
// Usage: node scripts/man-pages-and-completions.ts DIR
import { execFile } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import type { Command, Option } from 'commander';
import { scripts } from '../broker/cli/completion-scripts.ts';
import { createProgram } from '../broker/cli/verb-tree.ts';
import { version } from '../shared/version.ts';

const root = join(import.meta.dirname, '..');
const mains = { 'farhand-agent': 'agent/main.ts', 'farhand-broker': 'broker/main.ts' } as const;
type Name = 'farhand' | keyof typeof mains;

/**
 * Writes manual pages and completions into `folder`, in the layout of /usr/share. Returns the paths of the pages in it.
 */
export async function addShare(folder: string, names: readonly Name[]): Promise<string[]> {
  const files: Record<string, string> = {};
  for (const name of names)
    Object.assign(files, name === 'farhand' ? await shareOfCli() : await pageOf(name));
  for (const [path, text] of Object.entries(files)) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), text);
  }
  return Object.keys(files).filter((path) => path.startsWith('man/'));
}

async function shareOfCli(): Promise<Record<string, string>> {
  const program = await createProgram();
  const nouns = program.commands.filter((one) => one.name() !== 'help');
  const pages = [program, ...nouns].map((command) => {
    const name = command === program ? 'farhand' : `farhand-${command.name()}`;
    return [`man/man1/${name}.1`, manual(name, command, nouns)] as const;
  });
  return {
    ...Object.fromEntries(pages),
    'bash-completion/completions/farhand': scripts.bash,
    'zsh/vendor-completions/_farhand': scripts.zsh,
    'fish/vendor_completions.d/farhand.fish': scripts.fish,
  };
}

// ---- Formatting in roff (man(7))

const roff = (text: string): string =>
  text
    .replaceAll('\\', '\\e')
    .replaceAll('-', '\\-')
    .replace(/^([.'])/gm, '\\&$1');
const asIs = (text: string): string => `.nf\n${roff(text)}\n.fi\n`;
const head = (name: string, section: number, about: string): string =>
  `.TH ${name.toUpperCase()} ${section} "" "Farhand ${version}" "Farhand manual"
.SH NAME
${roff(`${name} - ${about}`)}
`;

function manual(name: string, command: Command, nouns: readonly Command[]): string {
  const about = command.description().replace(/\.$/, '');
  const others = nouns.map((one) => `farhand-${one.name()}(1)`).filter((one) => one !== `${name}(1)`);
  const leaves = leavesOf(command);
  const isProgram = name === 'farhand';
  const verbs = isProgram
    ? `.SH COMMANDS\n${nouns.map((one) => item(`farhand ${one.name()}`, one.description())).join('')}`
    : `.SH COMMANDS\n${leaves.map(section).join('')}`;
  const see = isProgram ? others : ['farhand(1)', ...(name in mains ? [`${name}(8)`] : [])];
  return `${head(name, 1, about)}.SH SYNOPSIS
.B ${roff(isProgram ? 'farhand' : pathOf(command))}
${isProgram ? 'COMMAND' : leaves.length > 1 ? 'VERB' : roff(command.usage())}
${verbs}${isProgram ? `.SH NOTES\n${asIs(afterHelp(command))}` : ''}.SH SEE ALSO
${roff(see.join(', '))}
`;
}

const leavesOf = (command: Command): Command[] =>
  command.commands.length === 0
    ? [command]
    : command.commands.filter((one) => one.name() !== 'help').flatMap(leavesOf);

const pathOf = (command: Command): string =>
  command.parent ? `${pathOf(command.parent)} ${command.name()}` : command.name();

function section(command: Command): string {
  const options: readonly Option[] = command.createHelp().visibleOptions(command);
  return `.SS "${roff(`${pathOf(command)} ${command.usage()}`)}"
${roff(command.description())}
${options.map(({ flags, description }) => item(flags, description)).join('')}.PP
${asIs(afterHelp(command))}`;
}

const item = (title: string, text: string): string => `.TP\n.B ${roff(title)}\n${roff(text)}\n`;

/** Returns the text that --help prints below the options. */
function afterHelp(command: Command): string {
  let text = '';
  const writeOut = (more: string): void => {
    text += more;
  };
  command.configureOutput({ writeOut }).outputHelp();
  return text.slice(command.helpInformation().length).trim();
}

/** Returns the manual page of agent or broker, by its path. The page consists of what --help prints. */
async function pageOf(name: keyof typeof mains): Promise<Record<string, string>> {
  const help = async (...args: string[]): Promise<string> =>
    (await promisify(execFile)(process.execPath, [join(root, mains[name]), ...args, '--help'])).stdout.trim();
  const [first = '', ...rest] = (await help()).split('\n');
  const text = `${head(name, 8, first.replace(`${name}: `, ''))}.SH OPTIONS
${asIs(rest.join('\n').replace(/^\n+/, ''))}.SH SERVICE
${asIs(await help('install'))}.SH SEE ALSO
farhand(1)
`;
  return { [`man/man8/${name}.8`]: text };
}

if (import.meta.main) {
  const [folder] = process.argv.slice(2);
  if (!folder) throw new Error('usage: node scripts/man-pages-and-completions.ts DIR');
  console.log((await addShare(folder, ['farhand', 'farhand-agent', 'farhand-broker'])).join('\n'));
}
