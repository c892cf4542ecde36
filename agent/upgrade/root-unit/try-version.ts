// Starts a version of the agent as the service, and finds out whether it runs and connects to the broker.
import { join } from 'node:path';
import { monotonic, sleep } from '../../../shared/clock.ts';
import { StartError } from '../../../shared/errors.ts';
import { run, stateOf } from '../../../shared/systemd/control.ts';
import { linkIn } from '../../../shared/systemd/link-status-text.ts';

const service = 'farhand-agent';
const pollMs = 500;
/** Milliseconds for which the new version must stay linked. */
const stayMs = 10_000;
/** A service counts as failed after this number of restarts. */
const mostRestarts = 3;

/** Throws StartError unless the program in this directory starts and has this version. */
export async function assertRuns(home: string, version: string): Promise<void> {
  const { code, stdout, stderr } = await run(join(home, 'bin', service), ['--version']);
  if (code !== 0) throw new StartError(`the new version does not start: ${stderr.trim().slice(-500)}`);
  if (stdout.trim() !== version)
    throw new StartError(
      `the program in the package is version ${stdout.trim().slice(0, 64)}, not ${version}`,
    );
}

/**
 * Runs `install` of a version, which restarts the service. Returns the output if `install` fails, and '' if it
 * succeeds. The result does not say whether the service runs: that must be checked separately.
 */
async function startVersion(command: string): Promise<string> {
  const { code, stdout, stderr } = await run(command, ['install']);
  return code === 0 ? '' : (stderr || stdout).trim();
}

/**
 * Starts the service with the restored version, and restarts it once if that version does not run. Returns what is
 * wrong if the version does not run even after the restart; undefined if it runs.
 */
export async function faultOfRestored(command: string, version: string): Promise<string | undefined> {
  const output = await startVersion(command);
  if (await isRunning(version)) return undefined;
  const { stderr } = await run('systemctl', ['restart', service]);
  if (await isRunning(version)) return undefined;
  const { active, result } = await stateOf(service);
  const why = stderr.trim() || output || result;
  return `the service does not run the restored version ${version} (state of the service: ${active}): ${why}`;
}

async function isRunning(version: string): Promise<boolean> {
  const state = await stateOf(service);
  return state.active === 'active' && state.version === version;
}

/**
 * Starts the new version, and waits until it links and stays linked. Returns what is wrong with it; undefined if it
 * works.
 */
export async function faultOfNewVersion(
  command: string,
  version: string,
  timeoutMs: number,
): Promise<string | undefined> {
  const until = monotonic() + timeoutMs;
  const output = await startVersion(command);
  let linkedSince: number | undefined;
  let restarts = 0;
  for (;;) {
    const state = await stateOf(service);
    const linked = state.active === 'active' && linkIn(state.status)?.machineId !== undefined;
    if (!linked || state.version !== version || state.restarts !== restarts) linkedSince = undefined;
    else linkedSince ??= monotonic();
    restarts = state.restarts;
    if (linkedSince !== undefined && monotonic() - linkedSince >= stayMs) return undefined;
    if (state.active === 'failed' || restarts >= mostRestarts)
      return `the new version fails at every start: ${output || state.status || state.result}`;
    if (monotonic() > until && linkedSince === undefined)
      return `the new version did not link within ${timeoutMs / 1000} s: ${state.status || output}`;
    await sleep(pollMs);
  }
}
