// Starts a command on its machine and follows it: output into the broker's logs, start and end into the ledger.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Asking } from '../../shared/rpc.ts';
import type { Link } from '../presence/index.ts';
import type { Ledger } from './ledger.ts';
import type { Spec } from './records.ts';
import { type End, isSound, verdict } from './reports.ts';
import type { Run } from './run.ts';

export interface Following {
  /** Hands a command to its agent, once in its life. */
  start(run: Run, link: Link, spec: Spec): void;
  /** Goes on where the output of a command ends. */
  resume(run: Run, link: Link): void;
}

/** What the follower cannot decide. */
export interface FollowingHooks {
  /** It surely never ran: whether it waits for its machine again. */
  again(run: Run): boolean;
  /** Sight of it was lost, and nobody follows it now. */
  lost(run: Run): void;
  /** The key behind it. */
  asking(run: Run): Asking;
}

type Parts = AsyncIterable<{ event?: ProcessEvent__Output | null }>;

const lasting = { idle_ms: 0, lane: 'process' } as const;

export function openFollowing(ledger: Ledger, hooks: FollowingHooks, log: Logger): Following {
  /** Follows one stream of events to its end; a lost link leaves the run open for the next one. Never rejects. */
  async function follow(run: Run, link: Link, parts: Parts, starting: boolean): Promise<void> {
    try {
      await hear(run, link, parts, starting);
    } catch (error) {
      log.error({ err: error, command_id: run.command.id }, 'a command could not be followed; trying again');
      hooks.lost(run);
    }
  }

  async function hear(run: Run, link: Link, parts: Parts, starting: boolean): Promise<void> {
    run.following = true;
    let unrun: End | undefined;
    try {
      for await (const { event } of parts) {
        if (run.end) return;
        unrun = event ? await take(run, link, event) : undefined;
        if (unrun) break;
      }
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      log.info({ why, command_id: run.command.id }, 'lost sight of a command');
      unrun = await refused(run, error, starting);
    } finally {
      run.following = false;
    }
    if (run.end) return;
    // Only now: whoever follows it next is the only one.
    if (!unrun) hooks.lost(run);
    else if (!hooks.again(run)) await ledger.ended(run, unrun);
  }

  /** The end of one that surely never ran is given back; any other is written. */
  async function take(run: Run, link: Link, event: ProcessEvent__Output): Promise<End | undefined> {
    if (!isSound(event)) await ledger.ended(run, { status: 'lost', reason: 'bad_report' });
    else if (event.started) ledger.started(run, event.started.started_at_ms);
    else if (event.output) {
      const { stream, offset, data } = event.output;
      await run.output.keep(stream === 'OUTPUT_STREAM_STDERR' ? 'stderr' : 'stdout', offset, data);
    } else if (event.exit) {
      const end = verdict(event.exit, run.command, link);
      if (end.status === 'expired') return end;
      // What the machine lost of the end shows as a gap there.
      const { stdout, stderr } = run.output;
      if (event.exit.stdout_bytes > stdout.end) await stdout.skip(event.exit.stdout_bytes);
      if (event.exit.stderr_bytes > stderr.end) await stderr.skip(event.exit.stderr_bytes);
      await ledger.ended(run, end);
    }
    return undefined;
  }

  /** A machine that refused to start it has not run it; whatever may have run stays open, or nobody knows. */
  async function refused(run: Run, error: unknown, starting: boolean): Promise<End | undefined> {
    if (!(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code)) return;
    const reason = `${error.code}: ${error.message}`;
    const unstarted = starting && run.command.started_at === null;
    if (unstarted && error.code !== 'machine_error') return { status: 'failed', reason };
    // Too busy to tell, or in the middle of telling: it is asked again.
    if (error.code === 'unavailable' || (starting && !unstarted)) return;
    await ledger.ended(run, { status: 'lost', reason });
  }

  return {
    start(run, link, spec) {
      const request = { id: run.command.id, spec: { ...spec, stdin: Buffer.from(spec.stdin) } };
      void follow(
        run,
        link,
        link.stub.startProcess(request, {
          request_id: run.requestId,
          caller: hooks.asking(run),
          ...lasting,
        }),
        true,
      );
    },
    resume(run, link) {
      const { stdout, stderr } = run.output;
      const request = { id: run.command.id, stdout_offset: stdout.end, stderr_offset: stderr.end };
      void follow(
        run,
        link,
        link.stub.followProcess(request, {
          request_id: newId('request'),
          caller: hooks.asking(run),
          ...lasting,
        }),
        false,
      );
    },
  };
}
