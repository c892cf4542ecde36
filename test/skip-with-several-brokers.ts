// Tests that cannot run with FARHAND_TEST_BROKERS=3, with the reasons.
import type { SkipReasons } from './skip-reasons.ts';

const clock = 'sets the clock, which ends the leases of all brokers';
const order = 'each broker starts a batch in order on its own machines, independently of the others';
const inside = 'changes or reads the memory or files of one broker';
const each = 'each broker counts for itself';
const reports = 'a list has reports of the machines of other brokers that are up to 75 seconds old';
const move = 'a stream breaks off when its machine links to another broker';
const rights = 'the other brokers know a change of keys or machines only up to a second later';
const address = 'names the address of the broker that answers, unless --public-url is set';
const body = 'the proxy loses an answer whose connection the broker resets';
const packages = 'an uploaded package is in a file of one broker';
const ticket = 'a ticket for a login is known only to the broker that made it';

export const notWithSeveralBrokers: SkipReasons = {
  'alerts.test.ts': [[clock, /^memory over 90 for a minute|^an alert repeats until/]],
  'alerts-channels.test.ts': [
    [clock, /^a thousand machines that are offline/],
    [inside, /^the steps of a deleted rule/],
  ],
  'alerts-windows.test.ts': [[rights, /^a window by cron and tag/]],
  'audit.test.ts': [[each, /^repeated seventy times makes sixty rows/]],
  'batches.test.ts': [
    [
      order,
      /^when more than max_failures|^offline members count as failures|^DELETE cancels running|^members whose machines are not back/,
    ],
    [clock, /^waiting members expire at their time/],
    [
      inside,
      /^a batch of many machines|^a batch whose (first|second) part cannot be stored|^a batch that a full queue refuses/,
    ],
  ],
  'batches-follow.test.ts': [[each, /^a key follows at most 100 batches/]],
  'commands-on-busy-machine.test.ts': [[clock, /^waiting commands survive a minute/]],
  'commands-output.test.ts': [
    [inside, /^removed or shortened output files/],
    [move, /^a command that has not started yet can be followed/],
  ],
  'commands-queue.test.ts': [
    [move, /^a request that waits for a queued command|^secrets of a spec are in the database only/],
  ],
  'files.test.ts': [[body, /^a PUT accepts 12 MiB/]],
  'filters.test.ts': [[reports, /^every list is filtered by its fields/]],
  'http.test.ts': [
    [body, /^a declared body over 1 MiB|^a body of exactly 1 MiB/],
    [each, /^a path without parameters is its own route/],
  ],
  'http2-windows.test.ts': [[inside, /^32 downloads that stop/]],
  'key-changes.test.ts': [
    [rights, /^takes effect with its answer|^may remove the rights|^ends the old secret|^the last admin key/],
    [clock, /^with a grace leaves|^the last use of a key/],
  ],
  'keys.test.ts': [[reports, /^used again with the same key pair/]],
  'logins.test.ts': [
    [clock, /^need the key again after 15 minutes|^with the grace period|^after 12 hours|^after 7 days/],
    [ticket, /ticket|^is refused over a proxy/],
  ],
  'live.test.ts': [[rights, /^commands are named when they are created/]],
  'machine-statuses.test.ts': [[reports, /no longer allows metrics|^an item has the values/]],
  'machines.test.ts': [[reports, /^a list item has exactly the fields/]],
  'openapi.test.ts': [[address, /names this broker as its server|are made once/]],
  'prometheus.test.ts': [[address, /^each target is the path/]],
  'rate-limits.test.ts': [[each, /wrong keys/]],
  'sdk.test.ts': [[address, /^routes without a JSON envelope/]],
  'sessions-clients.test.ts': [[clock, /^a client whose key is expired/]],
  'tls.test.ts': [['asks each broker over HTTPS without its authority', /^a terminal works over TLS/]],
  'upgrades.test.ts': [
    [
      packages,
      /^an uploaded package is listed|limited to machines adds and deletes no packages|^uploaded packages take 4 GiB/,
    ],
    [reports, /^machines that cannot be upgraded/],
  ],
  'webhooks.test.ts': [[inside, /^a broker that lost its key file/]],
  'webhooks-address-guard.test.ts': [
    ['starts with port 0, which the proxy cannot have', /^the broker’s own listeners are refused/],
  ],
};
