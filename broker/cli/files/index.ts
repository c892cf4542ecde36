import type { Command } from 'commander';
export function addFiles(_p: Command): void {}
