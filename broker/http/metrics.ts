// Prometheus metrics of the broker: request durations and the number of machines.
import { collectDefaultMetrics, Gauge, Histogram, Registry } from 'prom-client';

export type RequestMetrics = ReturnType<typeof createMetrics>;

/**
 * Creates a separate metrics registry; `machines` returns the number of online and of registered machines.
 */
export function createMetrics(machines: () => { online: number; registered: number }) {
  const registry = new Registry();
  collectDefaultMetrics({ register: registry });
  const requests = new Histogram({
    name: 'farhand_http_request_seconds',
    help: 'Duration of REST requests',
    labelNames: ['method', 'route', 'status'],
    buckets: [0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60],
    registers: [registry],
  });
  new Gauge({
    name: 'farhand_machines',
    help: 'Machines by state',
    labelNames: ['state'],
    registers: [registry],
    collect() {
      const { online, registered } = machines();
      this.set({ state: 'online' }, online);
      this.set({ state: 'offline' }, registered - online);
    },
  });
  return {
    observe: (method: string, route: string, status: number, ms: number): void =>
      requests.observe({ method, route, status }, ms / 1000),
    /** The metrics in Prometheus text format, with their content type. */
    text: async () => ({ type: registry.contentType, body: await registry.metrics() }),
  };
}
