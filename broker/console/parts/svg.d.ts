// What an import of an icon is: scripts/build-console.ts turns its file into a list of elements.
declare module '*.svg' {
  const nodes: import('./icon.tsx').IconNodes;
  export default nodes;
}
