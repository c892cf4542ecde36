// Finds the syntax highlighting for a file by its name or first line.
import type { StreamParser } from '@codemirror/language';
import { dockerFile } from '@codemirror/legacy-modes/mode/dockerfile';
import { javascript, json } from '@codemirror/legacy-modes/mode/javascript';
import { nginx } from '@codemirror/legacy-modes/mode/nginx';
import { properties } from '@codemirror/legacy-modes/mode/properties';
import { python } from '@codemirror/legacy-modes/mode/python';
import { shell } from '@codemirror/legacy-modes/mode/shell';
import { toml } from '@codemirror/legacy-modes/mode/toml';
import { yaml } from '@codemirror/legacy-modes/mode/yaml';

const byName: readonly (readonly [name: RegExp, parser: StreamParser<unknown>])[] = [
  [/\.(sh|bash|zsh)$|^\.(bashrc|profile|bash_profile|zshrc)$/, shell],
  [/\.ya?ml$/, yaml],
  [/\.toml$/, toml],
  [/nginx.*\.conf$/, nginx],
  [/\.(ini|conf|cfg|cnf|env|properties|service|timer|socket|mount|desktop)$|^\.env/, properties],
  [/\.py$/, python],
  [/\.([cm]?[jt]sx?)$/, javascript],
  [/\.json$/, json],
  [/^(Dockerfile|Containerfile)/, dockerFile],
];

/** Returns the parser for a file; undefined if neither its name nor its first line identifies the language. */
export function languageOf(name: string, text: string): StreamParser<unknown> | undefined {
  return (
    byName.find(([pattern]) => pattern.test(name))?.[1] ??
    (/^#!.*\b(ba|z|da)?sh\b/.test(text) ? shell : /^#!.*python/.test(text) ? python : undefined)
  );
}
