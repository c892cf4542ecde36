// What the machine's own log says of each call: what it was about, never contents, input or environment.
import type { AgentMethods, Method } from '../../shared/rpc.ts';

/** What a line tells of a request, in the words of whoever reads it with jq. */
export type Told = Record<string, unknown>;

type RequestOf<M extends Method> = Parameters<AgentMethods[Uncapitalize<M>]>[0];
type FirstOf<Request> = Request extends AsyncIterable<infer One> ? One : Request;

interface Deed<Request> {
  /** Of the request, or of the first where there are many. */
  tell(request: Request): Told;
  /** It is there to last: a line as it starts, too, and not only where it takes long. */
  lasts?: true;
}

/** Longest text in a line: a command may be a whole script. */
const longest = 4096;
const mostArgs = 64;

const text = (told: string): string => (told.length > longest ? `${told.slice(0, longest)}…` : told);
const path = (name: Buffer): string => text(name.toString());
const atPath = { tell: (request: { path: Buffer }): Told => ({ path: path(request.path) }) };
const ofProcess = { tell: ({ id }: { id: string }): Told => ({ id: text(id) }) };
const fromTo = {
  tell: ({ source, destination }: { source: Buffer; destination: Buffer }): Told => ({
    source: path(source),
    destination: path(destination),
  }),
};
const opened = {
  tell: ({ open }: { open?: { path: Buffer } | null }): Told => (open ? { path: path(open.path) } : {}),
};
const list = (all: readonly string[]): string[] =>
  all.length > mostArgs ? [...all.slice(0, mostArgs), '…'].map(text) : all.map(text);

/** A new rpc without any does not compile; `null` is not told of. */
const deeds: { [M in Method]: Deed<FirstOf<RequestOf<M>>> | null } = {
  // The broker asks again and again, and learns nothing but numbers.
  GetMetrics: null,
  ListFiles: atPath,
  ReadFile: atPath,
  WriteFile: opened,
  StatFile: atPath,
  MakeDirectory: atPath,
  RemoveFile: {
    tell: ({ path: name, recursive }) => ({ path: path(name), ...(recursive && { recursive }) }),
  },
  MoveFile: fromTo,
  CopyFile: fromTo,
  ChangeFile: {
    tell: ({ path: name, mode, owner, group }) => ({
      path: path(name),
      ...(mode !== undefined && { mode: mode.toString(8).padStart(4, '0') }),
      ...(owner !== undefined && { owner: text(owner) }),
      ...(group !== undefined && { group: text(group) }),
    }),
  },
  ReadArchive: atPath,
  WriteArchive: opened,
  SearchFiles: {
    tell: ({ path: at, name, content }) => ({
      path: path(at),
      ...(name && { name: text(name) }),
      ...(content && { in_contents: true }),
    }),
  },
  WatchFiles: { ...atPath, lasts: true },
  StartProcess: {
    lasts: true,
    tell: ({ id, spec }) => ({
      id: text(id),
      ...(spec && { command: text(spec.command) }),
      ...(spec?.direct && { args: list(spec.args) }),
      ...(spec?.user && { user: text(spec.user) }),
      ...(spec?.cwd && { cwd: text(spec.cwd) }),
    }),
  },
  FollowProcess: { ...ofProcess, lasts: true },
  WriteInput: ofProcess,
  SignalProcess: { tell: ({ id, signal }) => ({ id: text(id), signal: text(signal) }) },
  OpenTerminal: {
    lasts: true,
    tell: ({ id, spec }) => ({
      id: text(id),
      ...(spec?.program && { command: text(spec.program), args: list(spec.args) }),
      ...(spec?.cwd && { cwd: text(spec.cwd) }),
    }),
  },
  KeepTerminal: { ...ofProcess, lasts: true },
  AttachTerminal: {
    lasts: true,
    tell: ({ open }) => (open ? { id: text(open.id), client_id: text(open.client_id) } : {}),
  },
  KillProcess: ofProcess,
  ForgetProcesses: { tell: ({ ids }) => ({ ids: list(ids) }) },
};

/** How the log tells of a method; undefined where it does not. */
export function deedOf(method: string): Deed<unknown> | undefined {
  if (!Object.hasOwn(deeds, method)) return { tell: () => ({}) };
  // The caller has decoded the request with the shape of this very method.
  return deeds[method as Method] ?? undefined;
}

interface Exit {
  outcome?: string;
  exit_code?: number;
  signal?: string;
}

/** What a response tells of a process that is over. */
export function exitOf(response: unknown): Told | undefined {
  // Only processes and terminals answer with events.
  const { event } = response as { event?: { exit?: Exit | null } | null };
  if (!event?.exit) return undefined;
  const { outcome, exit_code, signal } = event.exit;
  return {
    outcome: outcome?.replace('PROCESS_OUTCOME_', '').toLowerCase(),
    exit_code,
    ...(signal && { signal }),
  };
}
