// All pages except Machines, in one script that is loaded when a user first opens one of them. In one script, the
// pages take a quarter fewer bytes than in separate scripts.
export { AlertChannel } from './alert-channel.tsx';
export { Alerts } from './alerts.tsx';
export { Audit } from './audit.tsx';
export { Batch } from './batch.tsx';
export { Batches } from './batches.tsx';
export { Brokers } from './brokers.tsx';
export { Command } from './command.tsx';
export { Commands } from './commands.tsx';
export { Events } from './events.tsx';
export { Inventory } from './inventory.tsx';
export { Join } from './join-machine.tsx';
export { Keys } from './keys.tsx';
export { Machine } from './machine.tsx';
export { Profile } from './profile.tsx';
export { Run } from './run.tsx';
export { SavedCommandPage } from './saved-command.tsx';
export { SavedCommands } from './saved-commands.tsx';
export { Schedule } from './schedule.tsx';
export { Schedules } from './schedules.tsx';
export { UpgradePage } from './upgrade.tsx';
export { Upgrades } from './upgrades.tsx';
export { Webhook } from './webhook.tsx';
export { Webhooks } from './webhooks.tsx';
