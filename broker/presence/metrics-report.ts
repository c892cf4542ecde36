// The report of an agent about its machine, such as CPU, memory and disks. This file checks what an agent has sent.
import { z } from 'zod';
import type { Metrics__Output } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import { latestInstant, now } from '../../shared/clock.ts';
import { percentUsed } from '../../shared/percent-used.ts';

/** The limit of uint64. Some file servers, such as Amazon EFS, report a size of 2 ** 63 bytes. */
const largest = 2 ** 64;
const amount = z.number().min(0).max(largest);
const space = z.object({ total: amount, used: amount, free: amount });
const disk = space.extend({ available: amount.optional() });
const absent = { total: 0, used: 0, free: 0 };

/** The form of a valid report. Other code relies on its limits, so a report that exceeds one of them is ignored. */
const reportSchema = z.object({
  recorded_at_ms: z.number().min(0).max(latestInstant),
  uptime_s: amount,
  cpu_usage: z.number().min(0).max(100),
  cpu_cores: amount,
  memory: space.nullish().transform((value) => value ?? absent),
  disk: disk.nullish().transform((value) => value ?? absent),
  load_average: z.array(amount).max(3),
  disks: z
    .array(z.object({ mount: z.string().max(4096), filesystem: z.string().max(255), space: disk.nullish() }))
    .max(256),
  network: z
    .array(z.object({ name: z.string().max(255), received_bytes: amount, sent_bytes: amount }))
    .max(256),
  agent_rss: amount,
  agent_uptime_s: amount,
});
/**
 * A checked report. `clock_offset_ms` is the machine's clock minus the broker's clock. It is missing in a report that
 * an older version of the broker has stored.
 */
export type Report = z.output<typeof reportSchema> & { clock_offset_ms?: number };

/** Checks a report that an agent has sent. Returns undefined if it is missing or invalid. */
export function reportOf(metrics: Metrics__Output | null | undefined): Report | undefined {
  const report = metrics ? reportSchema.safeParse(metrics).data : undefined;
  return report && { ...report, clock_offset_ms: report.recorded_at_ms - now() };
}

/** Returns the used share of memory or disk space, in percent; 0 if its size is unknown. */
export const percentOf = (space: Parameters<typeof percentUsed>[0]): number => percentUsed(space) ?? 0;
