// tar, for the agent and for `farhand files`: entries in and out, and which names an archive may use.
export { type Bytes, bytes, fromText, toText } from './byte-names.ts';
export { encodeHeader, endOfArchive, paddingOf, type TarHeader } from './header.ts';
export { entryFault, readTar, type TarEntry } from './reader.ts';
export { assertInside, assertTarget, pathOfEntry } from './safe-names.ts';
