// Loads the script of a page or tab when it is first opened.
import { type ComponentType, createElement } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { Failed, Placeholder } from './loading-failed-or-empty.tsx';

/** A component whose script is loaded when it is first drawn. */
export function later<P extends object>(load: () => Promise<ComponentType<P>>): ComponentType<P> {
  let loaded: ComponentType<P> | undefined;
  return function Later(props: P) {
    const [component, setComponent] = useState(() => loaded);
    const [error, setError] = useState<unknown>(undefined);
    useEffect(() => {
      if (component) return;
      load().then((arrived) => {
        loaded = arrived;
        setComponent(() => arrived);
      }, setError);
    }, [component]);
    if (error !== undefined) return <Failed error={error} retry={() => location.reload()} />;
    return component ? createElement(component, props) : <Placeholder />;
  };
}
