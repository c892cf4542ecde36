// The events machine.online and machine.offline, with a history whose writes never end.
import { expect, onTestFinished, test } from 'vitest';
import { recordMachineEvents } from '../broker/machines/online-offline-events.ts';
import { type Link, Presence } from '../broker/presence/index.ts';
import { fakeClock } from './fake-clock.ts';
import { quiet } from './start-farhand.ts';

type Services = Parameters<typeof recordMachineEvents>[0];

test('a machine that goes offline while machine.online is being written still gets machine.offline', async () => {
  const clock = fakeClock(1_800_000_000_000);
  const presence = new Presence();
  const emitted: string[] = [];
  const services = {
    presence,
    state: { machines: new Map([['mach_a', { id: 'mach_a' }]]) },
    machineFacts: { of: () => undefined },
    events: { emit: (_transaction: object, type: string) => emitted.push(type) },
    history: {
      migrate: async () => {},
      all: async () => [],
      owns: () => true,
      write(change: (transaction: object) => void) {
        change({ about() {}, put() {} });
        return new Promise(() => {});
      },
    },
  };
  onTestFinished(await recordMachineEvents(services as unknown as Services, quiet));
  const link = { machineId: 'mach_a' } as Link;
  presence.add(link);
  await clock.advance(2_000);
  presence.drop(link);
  presence.add(link);
  await clock.advance(2_000);
  presence.drop(link);
  await clock.advance(2_000);
  expect(emitted).toEqual(['machine.online', 'machine.offline']);
});
