import type { Command } from 'commander';
export function addDoctor(_p: Command): void {}
