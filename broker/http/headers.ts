// What answers are called, and what every one says to browsers: show it as it is told, keep nothing, load nothing, frame
// it nowhere.

/** Of every answer in the envelope. */
export const jsonType = 'application/json; charset=utf-8';

/** The reference page loads its own parts and the document, nothing from outside and no inline script. */
export const pagePolicy =
  "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/** On every answer, whatever its status. No Access-Control- header is ever among them. */
const always = {
  'X-Content-Type-Options': 'nosniff',
  'Cache-Control': 'no-store',
  'Content-Security-Policy': "default-src 'none'; frame-ancestors 'none'",
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Referrer-Policy': 'no-referrer',
  'X-Frame-Options': 'DENY',
};

/** `hsts`: browsers are told to come only over TLS from now on, which needs a certificate that they trust. */
export function headersOfAll(hsts: boolean): Readonly<Record<string, string>> {
  return hsts ? { ...always, 'Strict-Transport-Security': 'max-age=31536000' } : always;
}
