// The type of an imported icon file: scripts/build-console.ts converts it to a list of SVG elements.
declare module '*.svg' {
  const nodes: import('./icon.tsx').IconNodes;
  export default nodes;
}
