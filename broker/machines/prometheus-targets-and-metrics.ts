// Metrics of machines for Prometheus: the list of machines to scrape (http_sd), and the last report of each as text.
import type { Handlers } from '../../shared/api/route-table.ts';
import type { Report } from '../presence/metrics-report.ts';
import type { Machine, State } from '../state/index.ts';
import type { MachineSources } from './machine-to-json.ts';

interface Services extends MachineSources {
  state: State;
  publicUrl(): string;
}

const textType = 'text/plain; version=0.0.4; charset=utf-8';

export function prometheusHandlers(
  services: Services,
): Pick<Handlers['service'], 'metricsTargets' | 'machineMetrics'> {
  const { state, presence, machineFacts } = services;
  return {
    metricsTargets({ tags = '', port }, caller) {
      const wanted = tags.split(',').flatMap((tag) => tag.trim() || []);
      const machines = [...state.machines.values()].filter(
        (one) => caller.reaches(one.id) && wanted.every((tag) => one.tags.includes(tag)),
      );
      const { host, protocol } = new URL(services.publicUrl());
      const atBroker = ({ id }: Machine) => ({
        targets: [host],
        labels: { __scheme__: protocol.slice(0, -1), __metrics_path__: `/metrics/machines/${id}` },
      });
      const onMachine = ({ id, name }: Machine) => {
        const hostname = machineFacts.of(id)?.hostname || name;
        return { targets: [`${hostname}:${port}`], labels: {} };
      };
      const groups = machines.map((machine) => {
        const { targets, labels } = port === undefined ? atBroker(machine) : onMachine(machine);
        return { targets, labels: { ...labels, ...labelsOf(machine) } };
      });
      return { type: 'application/json', body: JSON.stringify(groups) };
    },
    machineMetrics({ machine_id }) {
      const online = presence.online(machine_id);
      const report = online ? machineFacts.allowedReport(machine_id) : undefined;
      return { type: textType, body: `${textOf(online, report)}\n` };
    },
  };
}

/**
 * Returns the labels of a machine. All tags are in one text that begins and ends with a comma, as in other Prometheus
 * service discoveries.
 */
function labelsOf({ id, name, tags }: Machine): Record<string, string> {
  const __meta_farhand_tags = tags.length > 0 ? `,${tags.join(',')},` : '';
  return { instance: name, machine_id: id, __meta_farhand_tags };
}

type Sample = readonly [value: number, labels?: Readonly<Record<string, string>>];

/**
 * Returns metrics in Prometheus' text format. A machine that is offline, or whose owner allows no metrics, has only
 * `farhand_machine_up`.
 */
function textOf(online: boolean, report: Report | undefined): string {
  const lines: string[] = [];
  const gauge = (name: string, help: string, samples: readonly Sample[]): void => {
    lines.push(`# HELP farhand_machine_${name} ${help}`, `# TYPE farhand_machine_${name} gauge`);
    for (const [value, labels = {}] of samples) {
      const all = Object.entries(labels).map(([key, text]) => `${key}="${escaped(text)}"`);
      lines.push(`farhand_machine_${name}${all.length > 0 ? `{${all.join(',')}}` : ''} ${value}`);
    }
  };
  gauge('up', '1 if the machine is linked to the broker', [[Number(online)]]);
  if (!report) return lines.join('\n');
  const { memory, disk, disks, network, load_average } = report;
  gauge('uptime_seconds', 'Time since the last boot', [[report.uptime_s]]);
  gauge('cpu_usage_percent', 'Processor time in use, in percent of all cores', [[report.cpu_usage]]);
  gauge('cpu_cores', 'Number of logical processors', [[report.cpu_cores]]);
  gauge('load1', 'Load average of the last minute', [[load_average[0] ?? 0]]);
  gauge('memory_total_bytes', 'Size of the memory', [[memory.total]]);
  gauge('memory_used_bytes', 'Memory in use', [[memory.used]]);
  gauge('disk_total_bytes', 'Size of the root file system', [[disk.total]]);
  gauge('disk_used_bytes', 'Bytes in use on the root file system', [[disk.used]]);
  const ofMounts = (field: 'total' | 'used'): Sample[] =>
    disks.flatMap(({ mount, space }): Sample[] => (space ? [[space[field], { mount }]] : []));
  gauge('filesystem_total_bytes', 'Size of a file system', ofMounts('total'));
  gauge('filesystem_used_bytes', 'Bytes in use on a file system', ofMounts('used'));
  const ofDevices = (field: 'received_bytes' | 'sent_bytes'): Sample[] =>
    network.map((one) => [one[field], { device: one.name }]);
  gauge(
    'network_received_bytes',
    'Bytes received by an interface since the boot',
    ofDevices('received_bytes'),
  );
  gauge('network_sent_bytes', 'Bytes sent by an interface since the boot', ofDevices('sent_bytes'));
  return lines.join('\n');
}

const escaped = (text: string): string =>
  text.replaceAll('\\', '\\\\').replaceAll('"', '\\"').replaceAll('\n', '\\n');
