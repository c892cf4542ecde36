// The last bytes of an output stream, and how many there were in all.

/** What a record keeps of each stream. */
const tailBytes = 1024 * 1024;
/** Pieces kept before they are made one: many small ones cost more than their bytes. */
const maxPieces = 256;

export class Tail {
  #pieces: Buffer[] = [];
  #kept = 0;
  end = 0;

  /** Takes bytes that lie at `offset`; what was seen already is left out. */
  take(offset: number, data: Buffer): void {
    const fresh = data.subarray(Math.max(0, this.end - offset));
    this.end = Math.max(this.end, offset + data.length);
    if (fresh.length === 0) return;
    // Decoded bytes are a view of a larger frame: keep a copy.
    this.#pieces.push(Buffer.from(fresh));
    this.#kept += fresh.length;
    if (this.#kept > 2 * tailBytes || this.#pieces.length > maxPieces) this.#compact();
  }

  bytes(): Buffer {
    return Buffer.concat(this.#pieces).subarray(-tailBytes);
  }

  #compact(): void {
    this.#pieces = [Buffer.from(this.bytes())];
    this.#kept = this.#pieces[0]?.length ?? 0;
  }
}
