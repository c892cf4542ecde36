// Text of a machine, as a terminal may be shown it.

// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is taken out
const control = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]/g;

/** Text of a machine may hold what a terminal obeys, or what turns its order around. */
export function clean(text: string): string {
  return text.replace(control, '\ufffd');
}
