// The results of a search below a folder. They are displayed while the search runs.
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Failed, Placeholder } from '../parts/page.tsx';
import { List } from '../parts/paged-list.tsx';
import { Ago } from '../parts/small-components.tsx';
import { bytesText, soon } from '../time.ts';
import { baseOf, downloadAddress, goToPath, isEditable, nameToRead, parentOf } from './paths.ts';

type Line = Awaited<ReturnType<typeof client.files.search>> extends AsyncIterable<infer T> ? T : never;
type Match = Extract<Line, { entry: unknown }>;
type End = Extract<Line, { end: unknown }>['end'];

export type SearchBy = 'name' | 'content';
/** Milliseconds between two drawings while results arrive. */
const drawMs = 100;

/** Returns the pattern for a searched text. A text without wildcards may occur anywhere in the name. */
const patternOf = (text: string): string => (/[*?[]/.test(text) ? text : `*${text}*`);

interface SearchProps {
  machine: string;
  folder: string;
  hidden: boolean;
  text: string;
  by: SearchBy;
}

interface Found {
  matches: readonly Match[];
  end?: End;
  error?: unknown;
}

function useSearch({ machine, folder, hidden, text, by }: SearchProps): Found {
  const [found, setFound] = useState<Found>({ matches: [] });
  useEffect(() => {
    const stop = new AbortController();
    const matches: Match[] = [];
    const draw = (rest: Omit<Found, 'matches'> = {}): void => {
      drawSoon.cancel();
      if (!stop.signal.aborted) setFound({ matches: [...matches], ...rest });
    };
    const drawSoon = soon(drawMs, draw);
    const read = async (): Promise<void> => {
      const input = {
        machine_id: machine,
        hidden,
        ignore_case: true,
        ...(folder && { path: folder }),
        ...(by === 'name' ? { name: patternOf(text) } : { content: text }),
      };
      for await (const line of client.files.search(input, { signal: stop.signal })) {
        if ('end' in line) return draw({ end: line.end });
        matches.push(line);
        drawSoon();
      }
    };
    setFound({ matches: [] });
    read().catch((error: unknown) => draw({ error }));
    return () => {
      stop.abort();
      drawSoon.cancel();
    };
  }, [machine, folder, hidden, text, by]);
  return found;
}

export function SearchResults(props: SearchProps) {
  const { matches, end, error } = useSearch(props);
  const { machine, folder, text } = props;
  if (error !== undefined) return <Failed error={error} />;
  if (matches.length === 0) {
    if (!end) return <Placeholder />;
    return (
      <Empty icon={icons.search} title={`Nothing below ${folder} matches ${text}`}>
        <p>Search from a folder further up, for hidden files, or by content instead of the name.</p>
      </Empty>
    );
  }
  return (
    <>
      <p class="muted" role="status">
        {statusOf(matches.length, end)}
      </p>
      <List
        label="Found"
        columns={[
          ['Name', 'wide'],
          ['Folder', 'phone-off'],
          ['Size', 'right'],
          ['Changed', 'phone-off'],
        ]}
      >
        {matches.map((match) => (
          <FoundRow key={`${match.entry.path}:${match.line}`} machine={machine} match={match} />
        ))}
      </List>
    </>
  );
}

function statusOf(count: number, end: End | undefined): string {
  const found = `${count.toLocaleString()} found`;
  if (!end) return `${found}, searching…`;
  const parts = [
    end.truncated ? `the first ${found}: narrow the search to see the others` : found,
    end.unreadable > 0 && `${end.unreadable.toLocaleString()} of ${end.visited.toLocaleString()} unreadable`,
  ];
  return parts.filter(Boolean).join(', ');
}

function FoundRow({ machine, match: { entry, line, text } }: { machine: string; match: Match }) {
  const name = nameToRead(entry);
  const isFolder = entry.type === 'directory';
  const folder = parentOf(entry.path);
  return (
    <tr>
      <td class="wide">
        <span class="entry">
          <Icon of={isFolder ? icons.folder : icons.file} />
          {entry.name_encoding === undefined && (isFolder || isEditable(entry)) ? (
            <button
              type="button"
              class="link cut"
              onClick={() => goToPath(isFolder ? { path: entry.path } : { edit: entry.path })}
            >
              {name}
            </button>
          ) : (
            <a href={downloadAddress(machine, entry)} download={baseOf(name)} class="cut">
              {name}
            </a>
          )}
          {text !== undefined && (
            <span class="mono muted cut">
              {line}: {text}
            </span>
          )}
        </span>
      </td>
      <td class="phone-off">
        {entry.name_encoding === undefined && (
          <button type="button" class="link" onClick={() => goToPath({ path: folder })}>
            {folder}
          </button>
        )}
      </td>
      <td class="right number">{isFolder ? '' : bytesText(entry.size ?? 0)}</td>
      <td class="muted phone-off">
        <Ago at={entry.modified_at} />
      </td>
    </tr>
  );
}
