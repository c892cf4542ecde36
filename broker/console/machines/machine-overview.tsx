// The overview of a machine: charts of its stored history, its last report, and its facts.
import { useEffect, useMemo } from 'preact/hooks';
import { percentUsed } from '../../../shared/percent-used.ts';
import { client } from '../api-client.ts';
import { bytesText, durationText } from '../format-times-and-sizes.ts';
import { listen, useTopic } from '../live-updates.ts';
import { Bar } from '../parts/bar-and-sparkline.tsx';
import { Chart } from '../parts/chart.tsx';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { Ago, Card, Choice, Fact, Notice } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { choiceIn } from '../router.ts';
import { every, hourMs, now } from '../timers.ts';

type Metrics = Awaited<ReturnType<typeof client.machines.metrics>>;
export type MachineDetail = Awaited<ReturnType<typeof client.machines.get>>;
type Status = Awaited<ReturnType<typeof client.machines.status>>;

const ranges = [
  ['1', '1 h'],
  ['6', '6 h'],
  ['24', '24 h'],
  ['48', '48 h'],
] as const;
const metricsEveryMs = 60_000;

export function Overview({ machine }: { machine: MachineDetail }) {
  const { id } = machine;
  const choice = choiceIn('range', ranges, '6');
  const range = choice.value;
  const since = new Date(now() - Number(range) * hourMs);
  const metrics = useData(
    (signal) => client.machines.metrics({ machine_id: id, since }, { signal }),
    [id, range],
  );
  const status = useData((signal) => client.machines.status({ machine_id: id }, { signal }), [id]);
  useTopic('machines');
  useEffect(() => listen(({ machines }) => machines?.some((one) => one.id === id) && status.reload()), [id]);
  useEffect(() => every(metricsEveryMs, metrics.reload), [metrics.reload]);
  return (
    <div class="overview">
      <section class="charts" aria-label="History">
        <div class="filters spread">
          <h2>History</h2>
          <Choice label="Range" {...choice} />
        </div>
        <Show of={metrics}>{(data) => <Charts metrics={data} hours={Number(range)} />}</Show>
      </section>
      <div class="side">
        <Card title="Now">
          <Show of={status}>{(data) => <Now status={data} />}</Show>
        </Card>
        <Card title="Machine">
          <Facts of={machine} />
        </Card>
        {status.data && <Disks disks={status.data.disks} />}
      </div>
    </div>
  );
}

function Facts({ of }: { of: MachineDetail }) {
  return (
    <dl class="facts">
      <Fact name="Host name">{of.hostname}</Fact>
      <Fact name="System">
        {of.os}, {of.arch}
      </Fact>
      <Fact name="Address">{of.ip}</Fact>
      <Fact name="Agent">{of.agent_version}</Fact>
      {of.broker && <Fact name="Broker">{of.broker.url}</Fact>}
      <Fact name="Allows">{of.capabilities.join(', ')}</Fact>
      <Fact name="Joined">
        <Ago at={of.created_at} />
      </Fact>
      <Fact name="Id">
        <code>{of.id}</code>
      </Fact>
    </dl>
  );
}

/**
 * The line of a chart is interrupted if the time between two points is more than this many times the usual interval
 * (`step`).
 */
const gapSteps = 2.5;

function Charts({ metrics: { points, step, until }, hours }: { metrics: Metrics; hours: number }) {
  const { times, cpu, memory, disk, load } = useMemo(() => {
    const rows: (Metrics['points'][number] | { at: string })[] = [];
    for (const point of points) {
      const before = rows.at(-1);
      const gap = before ? (Date.parse(point.at) - Date.parse(before.at)) / 1000 : 0;
      if (before && gap > step * gapSteps)
        rows.push({ at: new Date(Date.parse(before.at) + step * 1000).toISOString() });
      rows.push(point);
    }
    const of = (read: (point: Metrics['points'][number]) => number): (number | null)[] =>
      rows.map((row) => ('cpu_usage' in row ? read(row) : null));
    return {
      times: rows.map(({ at }) => Date.parse(at) / 1000),
      cpu: of((point) => point.cpu_usage),
      memory: of(({ memory_used: used, memory_total: total }) => percentUsed({ used, total }) ?? 0),
      disk: of(({ disk_used: used, disk_total: total }) => percentUsed({ used, total }) ?? 0),
      load: of((point) => point.load_average),
    };
  }, [points, step]);
  if (points.length < 2) {
    return (
      <Empty title="No history yet">
        <p>The first points appear {durationText(step * 2000)} after the machine joined.</p>
      </Empty>
    );
  }
  const last = Date.parse(until) / 1000;
  const shared = { times, span: [last - hours * 3600, last] as const };
  const percent = { ...shared, most: 100, format: (value: number) => `${Math.round(value)} %` };
  return (
    <div class="chart-grid">
      <Chart label="CPU" values={cpu} color="--accent-text" {...percent} />
      <Chart label="Memory" values={memory} color="--good" {...percent} />
      <Chart label="Disk of /" values={disk} color="--warn" {...percent} />
      <Chart
        label="Load, 1 minute"
        values={load}
        color="--muted"
        {...shared}
        format={(value) => value.toFixed(1)}
      />
    </div>
  );
}

function Now({ status }: { status: Status }) {
  return (
    <>
      {!status.connected && (
        <Notice>
          Offline: these values are from <Ago at={status.recorded_at} />.
        </Notice>
      )}
      <dl class="facts gauges">
        <Fact name="CPU">
          <Bar percent={status.cpu.usage} />
          <span class="muted small">{status.cpu.cores} cores</span>
        </Fact>
        <Fact name="Memory">
          <Bar percent={percentUsed(status.memory)} />
          <span class="muted small">
            {bytesText(status.memory.used)} of {bytesText(status.memory.total)}
          </span>
        </Fact>
        <Fact name="Disk">
          <Bar percent={percentUsed(status.disk)} />
          <span class="muted small">
            {bytesText(status.disk.used)} of {bytesText(status.disk.total)}
          </span>
        </Fact>
        <Fact name="Load">
          <span class="number">{status.load_average.map((load) => load.toFixed(2)).join('  ')}</span>
        </Fact>
        <Fact name="Up for">{durationText(status.uptime * 1000)}</Fact>
        <Fact name="Agent">
          {bytesText(status.agent.rss)}, up for {durationText(status.agent.uptime * 1000)}
        </Fact>
      </dl>
    </>
  );
}

function Disks({ disks }: { disks: Status['disks'] }) {
  if (disks.length < 2) return null;
  return (
    <Card title="File systems">
      <dl class="facts gauges">
        {disks.map((disk) => (
          <Fact key={disk.mount} name={disk.mount}>
            <Bar percent={percentUsed(disk)} title={disk.filesystem} />
            <span class="muted small">{bytesText(disk.available ?? disk.free)} free</span>
          </Fact>
        ))}
      </dl>
    </Card>
  );
}
