// The results of a search below a folder. They are displayed while the search runs.
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { bytesText } from '../format-times-and-sizes.ts';
import { Button } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Failed, Placeholder } from '../parts/loading-failed-or-empty.tsx';
import { Ago } from '../parts/small-components.tsx';
import { type Column, List } from '../parts/table-and-paged-list.tsx';
import { soon } from '../timers.ts';
import { EntryName } from './entry-list.tsx';
import { goToPath, isFolder, parentOf } from './paths.ts';

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
      <List label="Found" columns={columnsOf(machine)} items={matches} />
    </>
  );
}

function statusOf(count: number, end: End | undefined): string {
  const found = `${count.toLocaleString()} found`;
  if (!end) return `${found}, searching…`;
  const parts = [
    end.truncated ? `the first ${found}: narrow the search to see the others` : found,
    end.unreadable > 0 &&
      `${end.unreadable.toLocaleString()} of ${end.visited.toLocaleString()} entries could not be read`,
  ];
  return parts.filter(Boolean).join(', ');
}

const columnsOf = (machine: string): Column<Match>[] => [
  ['Name', (match) => <FoundName machine={machine} match={match} />, 'wide'],
  [
    'Folder',
    ({ entry: { path, name_encoding } }) =>
      name_encoding === undefined && (
        <Button text={parentOf(path)} class="link" press={() => goToPath({ path: parentOf(path) })} />
      ),
    'phone-off',
  ],
  ['Size', ({ entry }) => !isFolder(entry) && bytesText(entry.size ?? 0), 'right number'],
  ['Changed', ({ entry }) => <Ago at={entry.modified_at} />, 'muted phone-off'],
];

function FoundName({ machine, match: { entry, line, text } }: { machine: string; match: Match }) {
  return (
    <span class="entry">
      <Icon of={isFolder(entry) ? icons.folder : icons.file} />
      <EntryName machine={machine} entry={entry} />
      {text !== undefined && (
        <span class="mono muted cut">
          {line}: {text}
        </span>
      )}
    </span>
  );
}
