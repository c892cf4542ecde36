// A button with an icon and no text. Screen readers read its label.
import { Icon, type IconNodes } from './icon.tsx';

interface IconButtonProps {
  icon: IconNodes;
  label: string;
  press: () => void;
  title?: string;
  class?: string;
  disabled?: boolean;
  size?: number;
  'aria-expanded'?: boolean;
  'aria-pressed'?: boolean;
}

export function IconButton({
  icon,
  label,
  press,
  class: name = 'quiet',
  size = 16,
  ...rest
}: IconButtonProps) {
  return (
    <button type="button" class={`${name} icon-only`} aria-label={label} onClick={press} {...rest}>
      <Icon of={icon} size={size} />
    </button>
  );
}
