// The choices that the browser stores: the theme and the columns of the list of machines. Nothing else is
// stored.

/** The stored text of a choice; undefined if there is none, or the browser forbids storage. */
export function storedText(name: 'theme' | 'columns'): string | undefined {
  try {
    return localStorage.getItem(`farhand-${name}`) ?? undefined;
  } catch {
    return undefined;
  }
}

/**
 * Stores a choice; undefined removes it. If the browser forbids storage, the choice is lost when the page is
 * closed.
 */
export function storeText(name: 'theme' | 'columns', text: string | undefined): void {
  try {
    if (text === undefined) localStorage.removeItem(`farhand-${name}`);
    else localStorage.setItem(`farhand-${name}`, text);
  } catch {
    // This browser forbids storage.
  }
}
