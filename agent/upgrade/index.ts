// The rpc StageUpgrade, by which the broker replaces the agent by the version of a signed package.
import type { AgentMethods } from '../../shared/agent-rpcs.ts';
import { AppError } from '../../shared/errors.ts';

export function createUpgrade(): Pick<AgentMethods, 'stageUpgrade'> {
  return {
    async *stageUpgrade() {
      yield* refused();
    },
  };
}

function refused(): never[] {
  const message = 'this agent cannot be upgraded by its broker; upgrade it by hand';
  throw new AppError('not_supported', message, { reason: 'no_upgrade_unit' });
}
