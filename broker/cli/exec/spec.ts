// What farhand exec was told.
import type { Farhand } from '../../../shared/sdk/index.ts';
import type { Common } from '../verb.ts';

export interface ExecOptions extends Common {
  tag?: string[];
  interactive?: boolean;
  timeout?: number;
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
  queueFor?: number;
  detach?: boolean;
  concurrency?: number;
  maxFailures?: number;
}

export type Spec = Omit<Parameters<Farhand['commands']['async']>[0], 'machine_id' | 'stdin' | 'input'>;
