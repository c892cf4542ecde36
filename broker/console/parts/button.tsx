// Buttons, and links that look like buttons.
import type { ButtonHTMLAttributes } from 'preact';
import { Icon, type IconNodes } from './icon.tsx';

interface ButtonProps extends Omit<ButtonHTMLAttributes<HTMLButtonElement>, 'icon'> {
  icon?: IconNodes;
  text?: string;
  press: () => void;
}

/** A button with an icon, a text or other content. */
export function Button({ icon, text, press, children, ...rest }: ButtonProps) {
  return (
    <button type="button" onClick={press} {...rest}>
      {icon && <Icon of={icon} />}
      {text}
      {children}
    </button>
  );
}

interface ButtonLinkProps {
  icon?: IconNodes;
  text?: string;
  href: string;
  class?: string;
  title?: string;
  download?: string;
  'aria-label'?: string;
}

export function ButtonLink({ icon, text, class: name = '', ...rest }: ButtonLinkProps) {
  return (
    <a class={`button ${name}`} {...rest}>
      {icon && <Icon of={icon} />}
      {text}
    </a>
  );
}

interface IconButtonProps extends Omit<ButtonProps, 'class' | 'size' | 'text'> {
  /** The text for screen readers and the tooltip, because the button displays only an icon. */
  label: string;
  icon: IconNodes;
  class?: string;
  size?: number;
}

export function IconButton({ icon, label, class: name = 'quiet', size = 16, ...rest }: IconButtonProps) {
  return (
    <Button class={`${name} icon-only`} aria-label={label} title={label} {...rest}>
      <Icon of={icon} size={size} />
    </Button>
  );
}
