// The tray of uploads at the bottom of the page: the progress of all uploads, and the reasons why uploads
// failed.

import { bytesText } from '../format-times-and-sizes.ts';
import { Button, IconButton } from '../parts/button.tsx';
import { close } from '../parts/icons.ts';
import { cancelUploads, dismissUploads, retryFailed, uploads } from './uploads.ts';

export function UploadTray() {
  const all = uploads.value;
  if (all.length === 0) return null;
  const active = all.filter(({ state }) => state === 'waiting' || state === 'sending');
  const failed = all.filter(({ state }) => state === 'failed');
  const done = all.filter(({ state }) => state === 'done').length;
  const sent = all.reduce((sum, one) => sum + one.sent, 0);
  const size = all.reduce((sum, { file }) => sum + file.size, 0);
  const title =
    active.length > 0
      ? `Uploading ${done + 1} of ${all.length}`
      : failed.length > 0
        ? `${failed.length} of ${all.length} uploads failed`
        : `${done} uploaded`;
  return (
    <section class="upload-tray" aria-label="Uploads">
      <header>
        <strong>{title}</strong>
        <span class="muted number">
          {bytesText(sent)} of {bytesText(size)}
        </span>
        {active.length > 0 ? (
          <Button text="Cancel" press={cancelUploads} />
        ) : (
          <>
            {failed.length > 0 && (
              <Button
                text={failed.every(({ exists }) => exists) ? 'Replace' : 'Try again'}
                press={retryFailed}
              />
            )}
            <IconButton icon={close} label="Close" press={dismissUploads} />
          </>
        )}
      </header>
      <progress max={Math.max(1, size)} value={size === 0 ? 1 : sent} aria-label="Bytes sent" />
      {failed.length > 0 && (
        <ul>
          {failed.slice(0, 5).map(({ path, error }, index) => (
            <li key={index}>
              <code>{path}</code> {error}
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}
