// The messages that send a package to one machine through the rpc StageUpgrade.
import { open } from 'node:fs/promises';
import type { StageUpgradeRequest } from '../../proto/types/farhand/agent/v1/StageUpgradeRequest.ts';
import { AppError } from '../../shared/errors.ts';
import type { AgentPackage } from '../agent-packages/index.ts';
import type { Upgrade } from './upgrade-tables.ts';

const chunkBytes = 256 * 1024;

/** Yields the description of a package, its content, and the end. */
export async function* stagingRequests(
  { id, running, wait_for, probe_timeout }: Upgrade,
  found: AgentPackage,
): AsyncGenerator<StageUpgradeRequest> {
  const { version, arch, kind, size, sha256, signature } = found;
  yield {
    open: {
      ...{ upgrade_id: id, version, arch, size, sha256: Buffer.from(sha256, 'hex') },
      kind: kind === 'deb' ? 'PACKAGE_KIND_DEB' : 'PACKAGE_KIND_TAR_GZ',
      signature: signature ? { ...signature, key_changes: [...signature.key_changes] } : null,
      running: running === 'end' ? 'RUNNING_PROCESSES_END' : 'RUNNING_PROCESSES_WAIT',
      // `wait_ms` is at least 1, because 0 stands for the agent's default.
      ...{ wait_ms: Math.max(1, wait_for), link_timeout_ms: probe_timeout },
    },
  };
  await using file = await open(found.path);
  for (let at = 0; at < size; ) {
    // Each chunk needs a buffer of its own, because it may have to wait before it is sent.
    const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(chunkBytes), 0, chunkBytes, at);
    if (bytesRead === 0)
      throw new AppError(
        'io_error',
        `the package ${found.file} is shorter than its signature says: build or upload it again`,
      );
    at += bytesRead;
    yield { chunk: buffer.subarray(0, bytesRead) };
  }
  yield { commit: {} };
}
