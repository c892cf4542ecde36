// Creates the type declarations of `farhand` and `farhand/grpc`. They need no types of other libraries.
import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { root, run } from './shared-by-packaging-steps.ts';

const entries = ['shared/sdk/index', 'shared/grpc-api-client'];
/**
 * Content of wire.d.ts. The generated types of the protos import these two types from gRPC's libraries, which users of
 * the package need not have.
 */
const wire = `/** A whole number of 64 bits. */
export interface Long {
  high: number;
  low: number;
  unsigned: boolean;
}

export interface MethodDefinition<RequestIn, ResponseIn, RequestOut = RequestIn, ResponseOut = ResponseIn> {
  requestSerialize(value: RequestIn): Uint8Array;
  requestDeserialize(bytes: Uint8Array): RequestOut;
  responseSerialize(value: ResponseIn): Uint8Array;
  responseDeserialize(bytes: Uint8Array): ResponseOut;
}
`;
/** Matches a quoted module name after `from` or in `import()`. */
const specifier = /(\bfrom |\bimport\()(["'])([^"']+)\2/g;

/** Writes the type declarations into the directory types/ of a package. */
export async function declare(folder: string, scratch: string): Promise<void> {
  const emitted = join(scratch, 'declarations');
  await emit(emitted);
  const types = join(folder, 'types');
  write(join(types, 'wire.d.ts'), wire);
  const done = new Set<string>();
  for (const entry of entries) take(join(emitted, `${entry}.d.ts`), { emitted, types, done });
  rmSync(emitted, { recursive: true });
}

async function emit(outDir: string): Promise<void> {
  const config = `${outDir}.json`;
  const compilerOptions = {
    noEmit: false,
    declaration: true,
    emitDeclarationOnly: true,
    rootDir: root,
    outDir,
  };
  const typeRoots = [join(root, 'node_modules/@types')];
  const files = entries.map((entry) => join(root, `${entry}.ts`));
  const content = { extends: join(root, 'tsconfig.json'), include: [], files };
  write(config, JSON.stringify({ ...content, compilerOptions: { ...compilerOptions, typeRoots } }));
  await run(join(root, 'node_modules/.bin/tsc'), ['-p', config]);
  rmSync(config);
}

interface Place {
  emitted: string;
  types: string;
  done: Set<string>;
}

/** Copies a declaration file, and then the files that it imports. */
function take(file: string, place: Place): void {
  if (place.done.has(file)) return;
  place.done.add(file);
  const target = targetOf(file, place);
  const text = withoutGrpc(readFileSync(file, 'utf8')).replace(
    specifier,
    (_whole, before: string, quote: string, name: string) => {
      const named = sourceOf(name, file);
      if (named) take(named, place);
      const to = named ? targetOf(named, place) : join(place.types, 'wire.d.ts');
      const path = relative(dirname(target), to).replace(/\.d\.ts$/, '.js');
      return `${before}${quote}${path.startsWith('.') ? path : `./${path}`}${quote}`;
    },
  );
  write(target, text);
}

/**
 * Removes the types of clients and handlers, which need gRPC's types. The messages and the definition of a service
 * remain.
 */
function withoutGrpc(text: string): string {
  return text
    .replace(/^import type \* as grpc .*\n/m, '')
    .replace(/^export interface \w+Client extends grpc\.Client [\s\S]*?\n}\n/m, '')
    .replace(/^export interface \w+Handlers extends grpc\.[\s\S]*?\n}\n/m, '')
    .replace(' extends grpc.ServiceDefinition', '');
}

/** Returns the declaration file of an imported module; undefined for gRPC's library, which wire.d.ts replaces. */
function sourceOf(name: string, from: string): string | undefined {
  if (name === 'zod') return join(root, 'node_modules/zod/index.d.ts');
  if (name.startsWith('.')) return join(dirname(from), name.replace(/\.(ts|js)$/, '.d.ts'));
  if (name === '@grpc/proto-loader') return undefined;
  throw new Error(`${from} declares types that refer to ${name}, which users of the package do not have`);
}

function targetOf(file: string, { emitted, types }: Place): string {
  const zod = join(root, 'node_modules/zod');
  return file.startsWith(`${zod}/`)
    ? join(types, 'zod', relative(zod, file))
    : join(types, relative(emitted, file));
}

function write(file: string, text: string): void {
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, text);
}
