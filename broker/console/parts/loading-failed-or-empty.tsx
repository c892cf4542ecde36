// What a page draws in place of data that is loading, could not be loaded, is out of date, or is empty.
import type { ComponentChildren } from 'preact';
import { FarhandError, messageOf } from '../api-client.ts';
import { Button } from './button.tsx';
import { Icon, type IconNodes } from './icon.tsx';
import { info, refresh, warning } from './icons.ts';
import type { Loaded } from './use-data.ts';

/** Draws the data of a page, a placeholder until the data arrives, or the error if loading failed. */
export function Show<T>({ of, children }: { of: Loaded<T>; children: (data: T) => ComponentChildren }) {
  const { data, error, reload } = of;
  if (data === undefined)
    return error === undefined ? <Placeholder /> : <Failed error={error} retry={reload} />;
  return (
    <>
      {error !== undefined && <Stale error={error} retry={reload} />}
      {children(data)}
    </>
  );
}

export function Placeholder({ rows = 6 }: { rows?: number }) {
  return (
    <div class="placeholder" role="status" aria-label="Loading">
      {Array.from({ length: rows }, (_, index) => (
        <span key={index} />
      ))}
    </div>
  );
}

function Stale({ error, retry }: { error: unknown; retry: () => void }) {
  return (
    <p class="notice warn" role="status">
      <Icon of={warning} />
      <span>This data may be out of date: {messageOf(error)}</span>
      <Button text="Try again" class="quiet" press={retry} />
    </p>
  );
}

export function Failed({ error, retry }: { error: unknown; retry?: () => void }) {
  // The code `forbidden` means that the key lacks a right. If the machine itself refuses the action, the code is
  // permission_denied.
  const forbidden = error instanceof FarhandError && error.code === 'forbidden';
  return (
    <Empty icon={warning} title={forbidden ? 'Your key does not allow this' : 'This could not be loaded'}>
      <p>{messageOf(error)}</p>
      {retry && <Button icon={refresh} text="Try again" press={retry} />}
    </Empty>
  );
}

/** The text in place of an empty list: what the list would contain, and the next step. */
export function Empty({
  icon = info,
  title,
  children,
}: {
  icon?: IconNodes;
  title: string;
  children?: ComponentChildren;
}) {
  return (
    <div class="empty">
      <span class="empty-icon">
        <Icon of={icon} size={22} />
      </span>
      <h2>{title}</h2>
      {children}
    </div>
  );
}
