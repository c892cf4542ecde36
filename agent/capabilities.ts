// What the machine's owner lets the agent do: a lock that no broker can widen.
import type { Method } from '../shared/rpc.ts';

export const allCapabilities = ['metrics', 'files:read', 'files:write', 'exec', 'terminal', 'user'] as const;
/** `user` is the right to run commands as another user than the agent's own. */
export type Capability = (typeof allCapabilities)[number];

/** The capabilities of which each rpc needs one; a new rpc without any does not compile. */
export const requiredCapabilities: Record<Method, readonly [Capability, ...Capability[]]> = {
  GetMetrics: ['metrics'],
  ListFiles: ['files:read'],
  ReadFile: ['files:read'],
  WriteFile: ['files:write'],
  StatFile: ['files:read'],
  MakeDirectory: ['files:write'],
  RemoveFile: ['files:write'],
  MoveFile: ['files:write'],
  CopyFile: ['files:write'],
  ChangeFile: ['files:write'],
  TouchFile: ['files:write'],
  ReadArchive: ['files:read'],
  WriteArchive: ['files:write'],
  SearchFiles: ['files:read'],
  WatchFiles: ['files:read'],
  StartProcess: ['exec'],
  FollowProcess: ['exec'],
  WriteInput: ['exec'],
  SignalProcess: ['exec'],
  OpenTerminal: ['terminal'],
  KeepTerminal: ['terminal'],
  AttachTerminal: ['terminal'],
  KillProcess: ['exec', 'terminal'],
  ForgetProcesses: ['exec', 'terminal'],
};
