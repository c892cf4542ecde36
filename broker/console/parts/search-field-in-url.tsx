// A search field whose text is a query parameter of the page's URL.
import { useEffect, useRef, useState } from 'preact/hooks';
import { place, setQuery } from '../router.ts';
import { after } from '../timers.ts';
import { Icon } from './icon.tsx';
import { search } from './icons.ts';

const typingMs = 120;

export function SearchField({ label, name }: { label: string; name: string }) {
  const inAddress = place.value.query.get(name) ?? '';
  const [text, setText] = useState(inAddress);
  const written = useRef(inAddress);
  useEffect(() => {
    // If this field itself has changed the URL, the text is not replaced, because the user may have typed more since.
    if (inAddress === written.current) return;
    written.current = inAddress;
    setText(inAddress);
  }, [inAddress]);
  useEffect(() => {
    if (text === inAddress) return undefined;
    return after(typingMs, () => {
      written.current = text;
      setQuery({ [name]: text });
    });
  }, [text]);
  return (
    <label class="search">
      <Icon of={search} />
      <span class="only-read">{label}</span>
      <input
        type="search"
        placeholder={label}
        value={text}
        autoComplete="off"
        spellcheck={false}
        onInput={({ currentTarget }) => setText(currentTarget.value)}
      />
      <span class="key" aria-hidden="true">
        /
      </span>
    </label>
  );
}
