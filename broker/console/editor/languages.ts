// Finds the syntax highlighting for a file by its name or first line, and loads it.
import type { StreamParser } from '@codemirror/language';

type Load = () => Promise<StreamParser<unknown>>;

const shell: Load = async () => (await import('@codemirror/legacy-modes/mode/shell')).shell;
const yaml: Load = async () => (await import('@codemirror/legacy-modes/mode/yaml')).yaml;
const toml: Load = async () => (await import('@codemirror/legacy-modes/mode/toml')).toml;
const nginx: Load = async () => (await import('@codemirror/legacy-modes/mode/nginx')).nginx;
const properties: Load = async () => (await import('@codemirror/legacy-modes/mode/properties')).properties;
const python: Load = async () => (await import('@codemirror/legacy-modes/mode/python')).python;
const script: Load = async () => (await import('@codemirror/legacy-modes/mode/javascript')).javascript;
const json: Load = async () => (await import('@codemirror/legacy-modes/mode/javascript')).json;
const docker: Load = async () => (await import('@codemirror/legacy-modes/mode/dockerfile')).dockerFile;

const byName: readonly (readonly [name: RegExp, load: Load])[] = [
  [/\.(sh|bash|zsh)$|^\.(bashrc|profile|bash_profile|zshrc)$/, shell],
  [/\.ya?ml$/, yaml],
  [/\.toml$/, toml],
  [/nginx.*\.conf$/, nginx],
  [/\.(ini|conf|cfg|cnf|env|properties|service|timer|socket|mount|desktop)$|^\.env/, properties],
  [/\.py$/, python],
  [/\.([cm]?[jt]sx?)$/, script],
  [/\.json$/, json],
  [/^(Dockerfile|Containerfile)/, docker],
];

/** Returns the parser for a file; undefined if neither its name nor its first line identifies the language. */
export async function languageOf(name: string, text: string): Promise<StreamParser<unknown> | undefined> {
  const load =
    byName.find(([pattern]) => pattern.test(name))?.[1] ??
    (/^#!.*\b(ba|z|da)?sh\b/.test(text) ? shell : /^#!.*python/.test(text) ? python : undefined);
  return load?.();
}
