// Measures `farhand exec MACHINE -- true`, run from source and run as shipped, and compares it with the start of Node.
// Usage: npx node scripts/bench/cli.ts
import { execFileSync, spawnSync } from 'node:child_process';
import { join } from 'node:path';
import { at, bench, machineId, median, root, startFarhand, timed } from './start-and-measure-programs.ts';

const times = 20;

await bench(async (folder) => {
  const farhand = await startFarhand(folder);
  const machine = await machineId(farhand, 0);
  const shipped = join(folder, 'cli');
  execFileSync(process.execPath, [join(root, 'scripts/bundle-programs.ts'), shipped]);
  const env = {
    PATH: process.env.PATH,
    HOME: folder,
    XDG_CACHE_HOME: folder,
    FARHAND_URL: farhand.http,
    FARHAND_API_KEY: farhand.key,
  };
  const exec = ['exec', machine, '--', 'true'];
  const ways: Record<string, string[]> = {
    'node -e 0': ['-e', '0'],
    'farhand exec, from source': [join(root, 'broker/cli/main.ts'), ...exec],
    'farhand exec, as shipped': [join(shipped, 'lib/farhand.js'), ...exec],
  };
  for (const [name, args] of Object.entries(ways)) {
    const once = async (): Promise<void> => {
      const { status, stderr } = spawnSync(process.execPath, args, {
        env,
        stdio: ['ignore', 'pipe', 'pipe'],
      });
      if (status !== 0) throw new Error(`${name} ended with ${status}: ${stderr.toString()}`);
    };
    await once();
    const took = await timed(times, once);
    console.log(`${name.padEnd(28)} ${median(took).toFixed(0)} ms p50, ${at(took, 0.95).toFixed(0)} ms p95`);
  }
});
