// The machine of a simulated agent: its reports, its commands, which end at once, and one small directory.
import type { Call__Output } from '../../../proto/types/farhand/link/v1/Call.ts';
import { decode, encode } from './proto-and-grpc-frames.ts';

/** The result of a call, as the agent sends it in `Reply`. */
export type Result =
  | { response: Buffer }
  | { messages: { messages: Buffer[] } }
  | { error: { code: string; message: string } };

/** The rpcs of agent.proto that a simulated machine serves. */
export const served = [
  'GetMetrics',
  'ListFiles',
  'ReadFile',
  'StatFile',
  'StartProcess',
  'FollowProcess',
  'SignalProcess',
  'KillProcess',
  'ForgetProcesses',
];
export const capabilities = ['metrics', 'files:read', 'exec'];

const gibibyte = 1024 ** 3;
/** Content of each file in the directory. Its size is typical of small settings files. */
const content = Buffer.alloc(512, 'setting = value\n');
const filesInDirectory = 20;
const directory = '/etc/simulated';
const startedAt = Date.now();

export class SimulatedMachine {
  readonly hostname: string;
  /**
   * The encoded messages that report the end of each command, by the command's id, until the broker has acknowledged
   * them. A real agent stores them on disk.
   */
  readonly #results = new Map<string, Buffer[]>();
  /** Ids of all commands that have run, including those whose results the broker has acknowledged. */
  readonly #ran = new Set<string>();
  #reports = 0;
  #runsTwice = 0;

  constructor(hostname: string) {
    this.hostname = hostname;
  }

  /** Ids of the commands whose results the broker has not acknowledged yet. */
  get processIds(): string[] {
    return [...this.#results.keys()];
  }

  /** Number of times that this machine ran a command. A command that ran twice counts twice. */
  get runs(): number {
    return this.#ran.size + this.#runsTwice;
  }

  /** Number of times that a broker has started a command that had already run. */
  get runsTwice(): number {
    return this.#runsTwice;
  }

  /** Returns a new report, of the size that a small server sends: two disks and two network interfaces. */
  report(): object {
    this.#reports += 1;
    const uptime_s = (Date.now() - startedAt) / 1000;
    const used = 2 * gibibyte + this.#reports * 4096;
    const space = { total: 8 * gibibyte, used, free: 8 * gibibyte - used };
    const network = ['lo', 'eth0'].map((name) => ({
      name,
      received_bytes: this.#reports * 10_007,
      sent_bytes: this.#reports * 20_011,
    }));
    return {
      recorded_at_ms: Date.now(),
      uptime_s,
      cpu_usage: (this.#reports * 7) % 100,
      cpu_cores: 4,
      memory: space,
      disk: { ...space, available: space.free },
      load_average: [0.5, 0.4, 0.3],
      disks: ['/', '/srv'].map((mount) => ({
        mount,
        filesystem: 'ext4',
        space: { ...space, available: space.free },
      })),
      network,
      agent_rss: 50 * 1024 * 1024,
      agent_uptime_s: uptime_s,
    };
  }

  answer(call: Call__Output): Result {
    if (call.request_follows) return refusal('not_supported', 'a simulated agent takes small requests only');
    const { request } = call;
    switch (call.method) {
      case 'GetMetrics':
        return { response: encode('GetMetricsResponse', { metrics: this.report() }) };
      case 'StartProcess':
        return this.#start(decode<{ id: string }>('StartProcessRequest', request).id);
      case 'FollowProcess':
        return this.#follow(decode<{ id: string }>('FollowProcessRequest', request).id);
      case 'SignalProcess':
      case 'KillProcess':
        return { response: encode(`${call.method}Response`, {}) };
      case 'ForgetProcesses':
        for (const id of decode<{ ids: string[] }>('ForgetProcessesRequest', request).ids)
          this.#results.delete(id);
        return { response: encode('ForgetProcessesResponse', {}) };
      case 'ListFiles':
        return list(decode('ListFilesRequest', request));
      case 'ReadFile':
        return read(decode('ReadFileRequest', request));
      case 'StatFile':
        return stat(decode('StatFileRequest', request));
      default:
        return refusal('not_supported', `a simulated agent does not have ${call.method}`);
    }
  }

  /**
   * Runs a command, which ends at once with exit code 0 and without output. A command whose result is still stored is
   * not run again.
   */
  #start(id: string): Result {
    const known = this.#results.get(id);
    if (known) return { messages: { messages: known } };
    if (this.#ran.has(id)) this.#runsTwice += 1;
    this.#ran.add(id);
    const at = Date.now();
    const exit = { outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 0, started_at_ms: at, finished_at_ms: at };
    const events = [{ started: { pid: 4_711, started_at_ms: at } }, { exit }];
    const messages = events.map((event) => encode('StartProcessResponse', { event }));
    this.#results.set(id, messages);
    return { messages: { messages } };
  }

  /**
   * Returns how a command ended. For a command that never reached this machine, the reason is `unknown_id`, and the
   * broker then sends the command again.
   */
  #follow(id: string): Result {
    // The stored messages have the type StartProcessResponse. They are valid as FollowProcessResponse too, because both
    // types have only the field `event`, with the same number.
    const messages = this.#results.get(id);
    if (messages) return { messages: { messages } };
    // `unknown_id`: a broker stored the command, and was killed before it sent the command to this machine.
    const exit = this.#ran.has(id)
      ? { outcome: 'PROCESS_OUTCOME_LOST', reason: 'forgotten' }
      : { outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'unknown_id' };
    return { messages: { messages: [encode('FollowProcessResponse', { event: { exit } })] } };
  }
}

function refusal(code: string, message: string): Result {
  return { error: { code, message } };
}

function entry(path: string, type: 'FILE' | 'DIRECTORY'): object {
  return {
    name: Buffer.from(path.slice(path.lastIndexOf('/') + 1)),
    path: Buffer.from(path),
    type: `FILE_TYPE_${type}`,
    size: type === 'FILE' ? content.length : 4_096,
    mode: type === 'FILE' ? 0o644 : 0o755,
    owner: 'root',
    group: 'root',
    modified_at_ms: startedAt,
  };
}

const isFile = (path: string): boolean => path.startsWith(`${directory}/`);

function list({ path, offset, limit }: { path: Buffer; offset: number; limit: number }): Result {
  const at = path.toString().replace(/\/$/, '') || directory;
  if (at !== directory) return refusal('file_not_found', `${at} does not exist`);
  const all = Array.from({ length: filesInDirectory }, (_, n) => entry(`${directory}/file-${n}`, 'FILE'));
  const end = limit === 0 ? undefined : offset + limit;
  const parts = [
    { head: { path: Buffer.from(at), total: all.length } },
    { batch: { entries: all.slice(offset, end) } },
  ];
  return { messages: { messages: parts.map((part) => encode('ListFilesResponse', part)) } };
}

function stat({ path }: { path: Buffer }): Result {
  const at = path.toString();
  if (!isFile(at)) return refusal('file_not_found', `${at} does not exist`);
  return { response: encode('StatFileResponse', { entry: entry(at, 'FILE'), etag: '"1"' }) };
}

function read({ path, offset }: { path: Buffer; offset: number }): Result {
  const at = path.toString();
  if (!isFile(at)) return refusal('file_not_found', `${at} does not exist`);
  const bytes = content.subarray(offset);
  const parts = [
    { head: { entry: entry(at, 'FILE'), etag: '"1"', offset, length: bytes.length } },
    { chunk: bytes },
  ];
  return { messages: { messages: parts.map((part) => encode('ReadFileResponse', part)) } };
}
