// Draws an icon of lucide as an SVG element.
import { createElement } from 'preact';

export type IconNodes = readonly (readonly [name: string, attributes: Readonly<Record<string, string>>])[];

/** An icon beside a text with the same meaning, so screen readers skip it. */
export function Icon({ of, size = 16 }: { of: IconNodes; size?: number }) {
  return (
    <svg
      class="icon"
      width={size}
      height={size}
      viewBox="0 0 24 24"
      fill="none"
      stroke="currentColor"
      stroke-width="2"
      stroke-linecap="round"
      stroke-linejoin="round"
      aria-hidden="true"
    >
      {of.map(([name, attributes], index) => createElement(name, { key: index, ...attributes }))}
    </svg>
  );
}
