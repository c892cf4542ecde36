// The addresses at which an agent tries to link: first those that a broker has sent, then those in its settings.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import * as z from 'zod';
import { writeDurably } from '../../shared/durable-file.ts';
import { isErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { isHostPort } from '../../shared/read-settings.ts';
import { mostBrokers } from '../settings-schema.ts';

const addresses = z.array(z.string().refine(isHostPort)).max(mostBrokers);
const stored = z.object({
  /** The newest addresses that a broker has sent. No link over them has succeeded so far. */
  offered: addresses,
  /** Addresses that a broker sent earlier. A link over one of them has succeeded. */
  proven: addresses,
});

export class BrokerAddresses {
  readonly #file: string;
  readonly #configured: readonly string[];
  readonly #log: Logger;
  #sent: z.output<typeof stored>;
  /** Addresses for the next attempts, in this order. */
  #left: string[] = [];
  #last = '';

  private constructor(
    file: string,
    configured: readonly string[],
    sent: z.output<typeof stored>,
    log: Logger,
  ) {
    this.#file = file;
    this.#configured = configured;
    this.#sent = sent;
    this.#log = log;
  }

  /**
   * Reads the addresses that a broker sent earlier. Ignores a file that cannot be read, because the agent can always
   * use the addresses in its settings.
   */
  static async open(directory: string, configured: readonly string[], log: Logger): Promise<BrokerAddresses> {
    const file = join(directory, 'brokers.json');
    let sent: z.output<typeof stored> = { offered: [], proven: [] };
    try {
      sent = stored.parse(JSON.parse(await readFile(file, 'utf8')));
    } catch (err) {
      if (!isErrno(err, 'ENOENT'))
        log.warn(
          { err, file },
          'cannot read the file with the addresses that a broker sent; using the addresses in the settings',
        );
    }
    return new BrokerAddresses(file, configured, sent, log);
  }

  /** Returns the address for the next attempt. Every address is tried before one is repeated. */
  next(): string {
    if (this.#left.length === 0) {
      const { offered, proven } = this.#sent;
      const last = (one: string): number => Number(one === this.#last);
      // Each of the three lists is shuffled, with the address of the previous attempt at its end. An attempt takes 30 s
      // if the host has vanished, so other addresses of the list are tried first.
      const all = [offered, proven, this.#configured].flatMap((some) =>
        shuffled(some).sort((a, b) => last(a) - last(b)),
      );
      this.#left = [...new Set(all)];
    }
    const [next = ''] = this.#left.splice(0, 1);
    this.#last = next;
    return next;
  }

  /** Call this when a link over `address` has succeeded. `sent`: the addresses that the broker sent over that link. */
  async linked(address: string, sent: readonly string[]): Promise<void> {
    this.#left = [];
    const before = JSON.stringify(this.#sent);
    if (this.#sent.offered.includes(address)) this.#sent = { offered: [], proven: this.#sent.offered };
    const offered = addresses.safeParse(sent);
    if (!offered.success)
      this.#log.warn('the broker has sent broker addresses that are not valid; ignoring them');
    else if (sent.length > 0 && isSame(sent, this.#sent.proven)) this.#sent = { ...this.#sent, offered: [] };
    else if (sent.length > 0)
      this.#sent = sent.includes(address)
        ? { offered: [], proven: offered.data }
        : { ...this.#sent, offered: offered.data };
    if (JSON.stringify(this.#sent) === before) return;
    await writeDurably(this.#file, JSON.stringify(this.#sent));
    this.#log.info(
      { brokers: [...this.#sent.offered, ...this.#sent.proven] },
      'the stored broker addresses have changed; using them from now on',
    );
  }
}

const isSame = (some: readonly string[], others: readonly string[]): boolean =>
  JSON.stringify([...some].sort()) === JSON.stringify([...others].sort());

function shuffled(list: readonly string[]): string[] {
  return list
    .map((one) => ({ one, at: Math.random() }))
    .sort((a, b) => a.at - b.at)
    .map(({ one }) => one);
}
