// Rate limits for the requests of each key (only with --rate-limit), and for wrong keys from each source address.
import { createHmac, randomBytes } from 'node:crypto';
import {
  type RateLimiterAbstract,
  RateLimiterMemory,
  RateLimiterPostgres,
  RateLimiterRes,
} from 'rate-limiter-flexible';
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import { after, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { sourceOf } from '../client-address.ts';

const windowSeconds = 60;
/** Maximum number of wrong keys and wrong join tokens that a source may send in a minute. */
const wrongFromOne = 30;
/**
 * Maximum number of wrong keys and wrong join tokens in a minute from an address that many clients share: loopback,
 * or a trusted proxy that reports no client.
 */
const wrongFromMany = 1_000;
/**
 * Delay of a refusal in milliseconds. Once a source is over its limit, every refusal after the first is delayed, so
 * that the source cannot keep the broker busy with quick retries.
 */
const refusalDelayMs = 500;
/** How many requests a key may make per minute, and how many more it may make in the present minute. */
export interface Quota {
  limit: number;
  remaining: number;
  /** Time at which the minute ends, in seconds since 1970. */
  reset: number;
  /** The error for a key that is over its limit. */
  refusal: AppError | undefined;
}

export type Rates = ReturnType<typeof createRateLimits>;

/**
 * Runs one SQL statement with `values` for `$1`, `$2` and so on, and returns the rows. Times and counts in the rows are
 * numbers, not texts.
 */
export type CountTogether = (text: string, values: (string | number | null)[]) => Promise<object[]>;

export interface RateSettings {
  /** Maximum number of requests per minute and key; undefined for no limit. */
  limit?: number | undefined;
  /**
   * Runs SQL in the database that several brokers share, so that they count the requests of each key together.
   * Undefined with a single broker.
   */
  countTogether?: CountTogether | undefined;
  /** True for the address of a trusted proxy. Many clients may share it, if the proxy reports no client. */
  isShared?: (address: string) => boolean;
  /**
   * Number of counters for wrong keys. Several sources share a counter, so that the memory does not grow with the
   * number of sources.
   */
  buckets?: number;
}

export function createRateLimits({
  limit,
  countTogether,
  isShared = () => false,
  buckets = 16_384,
}: RateSettings) {
  const requests =
    limit === undefined ? undefined : countTogether ? sharedLimiter(limit, countTogether) : limiter(limit);
  const fromOne = limiter(wrongFromOne);
  const fromShared = limiter(wrongFromMany);
  const bucketOf = bucketing(buckets);
  return {
    /** Counts one request of a key; returns undefined if there is no limit. */
    async spend(key: KeyId): Promise<Quota | undefined> {
      if (!requests) return undefined;
      const { msBeforeNext, remainingPoints, consumedPoints } = await spent(requests, key);
      const over = consumedPoints > requests.points;
      return {
        limit: requests.points,
        remaining: remainingPoints,
        reset: Math.ceil((now() + msBeforeNext) / 1_000),
        refusal: over ? tooMany('this key has made too many requests', msBeforeNext) : undefined,
      };
    },
    /** Counts a wrong key or join token from an address. Throws rate_limited beyond the limit. */
    async countWrongKey(address: string): Promise<void> {
      const many = isLoopback(address) || isShared(address);
      const source = many ? fromShared : fromOne;
      const { msBeforeNext, consumedPoints } = await spent(source, bucketOf(sourceOf(address)));
      if (consumedPoints <= source.points) return;
      if (consumedPoints > source.points + 1)
        await new Promise<void>((resolve) => void after(refusalDelayMs, resolve));
      throw tooMany('too many wrong keys came from this address', msBeforeNext);
    },
  };
}

function limiter(points: number): RateLimiterMemory {
  return new RateLimiterMemory({ points, duration: windowSeconds });
}

/**
 * Counts the requests of a key at all brokers. While the database does not answer, this broker counts only the requests
 * that it gets itself.
 */
function sharedLimiter(points: number, countTogether: CountTogether): RateLimiterPostgres {
  const query = async ({ text, values }: { text: string; values: (string | number | null)[] }) => ({
    rows: await countTogether(text, values),
  });
  return new RateLimiterPostgres({
    ...{ points, duration: windowSeconds, keyPrefix: 'requests', insuranceLimiter: limiter(points) },
    ...{ storeClient: { query }, storeType: 'pool', tableName: 'rate_limits', tableCreated: true },
    clearExpiredByTimeout: false,
  });
}

/**
 * Counts a request or a wrong key, and returns the count in the present minute, even if consume() rejects because the
 * limit is exceeded.
 */
async function spent(from: RateLimiterAbstract, what: string): Promise<RateLimiterRes> {
  return from.consume(what).catch((over: unknown) => {
    if (over instanceof RateLimiterRes) return over;
    throw over;
  });
}

function tooMany(what: string, ms: number): AppError {
  const retry_after = Math.max(1, Math.ceil(ms / 1_000));
  return new AppError('rate_limited', `${what}: try again in ${retry_after} s`, { retry_after });
}

/**
 * Assigns each source to a counter by a hash with a secret key, so that attackers cannot compute which sources share a
 * counter.
 */
function bucketing(buckets: number): (source: string) => string {
  const secret = randomBytes(32);
  return (source) => String(createHmac('sha256', secret).update(source).digest().readUInt32BE() % buckets);
}
