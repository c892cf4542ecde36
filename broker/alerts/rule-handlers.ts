// The REST handlers of alert rules. They check that the fields of a rule fit its kind, and that the caller may use
// all machines of the rule.
import { type AlertKind, alertRules as routes } from '../../shared/api/alerts.ts';
import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { day, type RuleId } from '../../shared/api/shared-schemas.ts';
import { iso } from '../../shared/clock.ts';
import { definedFields, setsNothing } from '../../shared/defined-fields.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { found, tooMany } from '../find-or-not-found.ts';
import { currentKey, holds, type Limits, mayUseAll } from '../keys/rights.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { AlertRule, Declared, State } from '../state/index.ts';

type Changes = Omit<Input<Api['alertRules']['update']>, 'rule_id'>;

/** Maximum number of rules: each report of a machine is compared with every rule about measured values. */
const maxRules = 1_000;
const defaultFor = 300_000;
const defaultBefore = 14 * day;

const measured: readonly AlertKind[] = ['cpu', 'memory', 'disk', 'load'];
const expiring: readonly AlertKind[] = ['certificate', 'key'];

export const isMeasured = (kind: AlertKind): boolean => measured.includes(kind);
/** True for kinds about the broker itself, which concern no machine. */
export const isAboutBroker = (kind: AlertKind): boolean => expiring.includes(kind);

export function ruleHandlers(state: State): Handlers['alertRules'] {
  return {
    list: (input, caller) =>
      pageOf(
        routes.list,
        [...state.alert_rules.values()].filter((rule) => mayManage(caller, rule, state)),
        input,
      ),
    create: async ({ name, kind, ...params }, caller) => {
      const at = iso();
      const rule = checked({
        ...{ id: newId('alertRule') as RuleId, name, kind, ...defaultsOf(kind), ...definedFields(params) },
        ...{ created_at: at, updated_at: at },
      });
      await state.change((transaction) => {
        assertMayManage(caller, rule, transaction.before);
        assertMayRead(caller, rule, transaction.before);
        if (transaction.before.alert_rules.size >= maxRules) throw tooMany('alert rules', maxRules);
        transaction.put('alert_rules', rule);
        caller.commit(transaction, { rule_id: rule.id });
      });
      return rule;
    },
    get: ({ rule_id }, caller) => find(rule_id, caller, state),
    update: ({ rule_id, ...changes }, caller) =>
      state.change((transaction) => {
        const before = find(rule_id, caller, transaction.before);
        if (setsNothing(changes)) return before;
        const recover = recoverAfter(before, changes);
        const rule = checked({ ...before, recover, ...definedFields(changes), updated_at: iso() });
        assertMayManage(caller, rule, transaction.before);
        assertMayRead(caller, rule, transaction.before);
        transaction.put('alert_rules', rule);
        caller.commit(transaction);
        return rule;
      }),
    remove: async ({ rule_id }, caller) => {
      await state.change((transaction) => {
        transaction.remove('alert_rules', find(rule_id, caller, transaction.before).id);
        caller.commit(transaction);
      });
      return { deleted: true };
    },
  };
}

function defaultsOf(kind: AlertKind) {
  return {
    ...{
      above: null,
      recover: null,
      mount: null,
      for: isMeasured(kind) || kind === 'offline' ? defaultFor : 0,
    },
    ...{ before: isAboutBroker(kind) ? defaultBefore : null },
    ...{ machine_ids: null, tags: null, repeat_every: null, channel_ids: null, enabled: true },
  };
}

/** The default of `recover`: 90 % of `above`, rounded to two decimal places. */
const defaultRecover = (above: number): number => Math.round(above * 90) / 100;

/**
 * Returns the `recover` of a rule after an update whose request does not set `recover`.
 * - Returns null if the old value was the default for the old `above`, or is higher than the new `above`. checked()
 *   then computes a new default.
 * - Otherwise returns the old value.
 */
function recoverAfter({ above: old, recover }: AlertRule, { above }: Changes): number | null {
  if (typeof above !== 'number' || old === null || recover === null) return recover;
  return recover === defaultRecover(old) || recover > above ? null : recover;
}

/** Returns the rule with a default for `recover`. Throws validation_failed for fields that do not fit its kind. */
function checked(rule: AlertRule): AlertRule {
  const { kind, above, before, machine_ids, tags } = rule;
  const refuse = (field: keyof AlertRule): void => {
    const text = `does not apply to rules of the kind ${kind}: leave it out`;
    throw fieldError('body', field, text);
  };
  if (isAboutBroker(kind)) {
    if (machine_ids) refuse('machine_ids');
    if (tags) refuse('tags');
    if (before === null)
      throw fieldError('body', 'before', 'is missing: set how long before the expiry the alert opens');
  } else if (before !== null) refuse('before');
  if (kind === 'schedule' && rule.for > 0) refuse('for');
  if (kind !== 'disk' && rule.mount !== null) refuse('mount');
  if (!isMeasured(kind)) {
    if (above !== null) refuse('above');
    if (rule.recover !== null) refuse('recover');
    return rule;
  }
  if (above === null)
    throw fieldError('body', 'above', `is missing: set the limit for ${kind} above which an alert opens`);
  if (kind !== 'load' && above >= 100)
    throw fieldError('body', 'above', 'is in percent, so it must be below 100');
  const recover = rule.recover ?? defaultRecover(above);
  if (recover > above) throw fieldError('body', 'recover', 'must not be higher than `above`');
  return { ...rule, recover };
}

/** True if a caller may use all machines that a rule or a maintenance window is about. */
export function mayManage({ key_id }: Caller, limits: Limits, declared: Declared): boolean {
  return mayUseAll(currentKey(declared, key_id), limits, declared);
}

function assertMayManage(caller: Caller, rule: AlertRule, declared: Declared): void {
  if (mayManage(caller, rule, declared)) return;
  const text =
    'this key is not allowed to use every machine of this alert rule: use another key, or limit the rule with machine_ids or tags';
  throw new AppError('forbidden', text, { rule_id: rule.id });
}

/**
 * An alert contains the name of its subject. A key that creates or changes a rule must therefore be allowed to read
 * these names.
 */
function assertMayRead({ key_id }: Caller, { id, kind }: AlertRule, declared: Declared): void {
  const scope = kind === 'key' ? 'admin' : kind === 'schedule' ? 'schedules:read' : undefined;
  if (!scope || holds(currentKey(declared, key_id), scope)) return;
  throw new AppError(
    'forbidden',
    `to create or change alert rules of the kind ${kind}, a key needs the scope ${scope}`,
    { rule_id: id },
  );
}

/**
 * Finds a rule. Throws rule_not_found if there is none with this id, and forbidden if the caller may not change it.
 */
function find(rule_id: string, caller: Caller, declared: Declared): AlertRule {
  const rule = found(declared.alert_rules, 'rule', rule_id);
  assertMayManage(caller, rule, declared);
  return rule;
}
