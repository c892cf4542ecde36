// The capabilities that a machine's owner can grant to the broker, and the ones that each rpc needs.
import type { Method } from '../shared/agent-rpcs.ts';

export const allCapabilities = [
  'metrics',
  'inventory',
  'files:read',
  'files:write',
  'exec',
  'terminal',
  'user',
  'upgrade',
] as const;
/** The capability `user` permits commands to run as another user than the agent's own. */
export type Capability = (typeof allCapabilities)[number];

/**
 * The capabilities that permit each rpc. The agent serves an rpc if the owner allows at least one capability in the
 * rpc's entry. The compiler reports an rpc that has no entry.
 */
export const requiredCapabilities: Record<Method, readonly [Capability, ...Capability[]]> = {
  GetMetrics: ['metrics'],
  GetInventory: ['inventory'],
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
  StageUpgrade: ['upgrade'],
};
