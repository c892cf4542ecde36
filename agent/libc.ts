// Functions of libc that Node does not have, through the native part of koffi. Optional, for it does not exist for every
// kind of machine: whoever asks for it can do without.

/** The package of that part for this machine. */
export const koffi = (): string => `@koromix/koffi-linux-${process.arch}`;

/** What it exports: a library's functions by their declarations in C. */
export interface Koffi<Call> {
  load(library: null): { func(declaration: string): Call };
}
