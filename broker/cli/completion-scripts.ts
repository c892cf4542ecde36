// The verb farhand completion: prints a script for bash, zsh or fish that calls farhand __complete at each
// TAB.
import type { Command } from 'commander';

/** The completion script of each shell. Each script completes local files if farhand has no candidate. */
export const scripts = {
  bash: `_farhand() {
  mapfile -t COMPREPLY < <("$1" __complete bash "\${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
  case \${COMPREPLY[0]} in *[:/=]) compopt -o nospace ;; esac
}
complete -o default -F _farhand farhand
`,
  zsh: `#compdef farhand
_farhand() {
  local -a found
  found=(\${(f)"$(farhand __complete zsh "\${(@Q)words[2,CURRENT-1]}" "$words[CURRENT]" 2>/dev/null)"})
  if (( ! $#found )); then _files
  else compadd -S '' -- \${(M)found:#*[:/=]}; compadd -- \${found:#*[:/=]}; fi
}
if [ "$funcstack[1]" = _farhand ]; then _farhand "$@"; else compdef _farhand farhand; fi
`,
  fish: `function __farhand_complete
  set -l found (farhand __complete fish (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
  if count $found >/dev/null; printf '%s\\n' $found; else; __fish_complete_path (commandline -ct); end
end
complete -c farhand -f -a '(__farhand_complete)'
`,
};

export function addCompletion(program: Command): void {
  const shells = Object.keys(scripts);
  program
    .command('completion')
    .description('print the script that completes verbs, flags, machines, tags and remote paths in a shell')
    .addArgument(program.createArgument('<shell>').choices(shells))
    .addHelpText('after', `\nExamples:\n${shells.map((shell) => `  ${loading[shell]}`).join('\n')}`)
    .action((shell: keyof typeof scripts) => void process.stdout.write(scripts[shell]));
}

const loading: Readonly<Record<string, string>> = {
  bash: 'eval "$(farhand completion bash)"                     in ~/.bashrc',
  zsh: 'eval "$(farhand completion zsh)"                      in ~/.zshrc, after compinit',
  fish: 'farhand completion fish > ~/.config/fish/completions/farhand.fish',
};
