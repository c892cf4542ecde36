// An esbuild plugin that replaces the table of routes by plain data without schemas. The schemas need zod, and take 60
// ms to build.
import type { Plugin } from 'esbuild';
import * as z from 'zod';
import { allRoutes } from '../../shared/api/route-table.ts';

const namesOf = (shape: object): Record<string, true> =>
  Object.fromEntries(Object.keys(shape).map((name) => [name, true]));

function plainRoutes() {
  return allRoutes().map(({ noun, operation, route }) => {
    const { method, path, base, kind, accepts, idempotency, lastEvent, summary } = route;
    const { params, query, headers, body } = route;
    const shapes = { params: namesOf(params), query: namesOf(query), headers: namesOf(headers) };
    const plain = {
      method,
      path,
      base,
      kind,
      accepts,
      idempotency,
      lastEvent,
      summary,
      ...shapes,
      body: body && namesOf(body instanceof z.ZodObject ? body.shape : {}),
    };
    return { noun, operation, route: plain };
  });
}

const readers = ['/shared/sdk/index.ts', '/broker/cli/verb-from-route.ts'];

/** Makes the modules in `readers` import plain data instead of the table of routes. */
export const routesAsData: Plugin = {
  name: 'routes as data',
  setup(esbuild) {
    esbuild.onResolve({ filter: /\/api\/route-table\.ts$/ }, ({ importer, kind }) =>
      readers.some((one) => importer.endsWith(one)) && kind === 'import-statement'
        ? { path: 'routes', namespace: 'routes-as-data' }
        : undefined,
    );
    esbuild.onLoad({ filter: /.*/, namespace: 'routes-as-data' }, () => ({
      contents: `const routes = ${JSON.stringify(plainRoutes())}; export const allRoutes = () => routes;`,
    }));
  },
};
