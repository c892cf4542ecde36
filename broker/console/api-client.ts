// The SDK client of the console. It adds the console's own header to requests, and reports when the login has ended.
import { signal } from '@preact/signals';
import { failureOf } from '../../shared/sdk/errors-and-envelopes.ts';
import { Farhand, FarhandError } from '../../shared/sdk/index.ts';

export { FarhandError };

/** True once the broker has answered 401, which means that the login has ended. */
export const loginEnded = signal(false);
/** Number of requests that were refused because the key lacks a scope. */
export const scopeRefusals = signal(0);

/**
 * Header that proves that a request comes from the console: browsers do not let pages of other sites send it. If a
 * request has the cookie of a login and a method other than GET and HEAD, the broker requires this header.
 */
export const consoleHeader: readonly [name: string, value: string] = ['X-Farhand-Console', '1'];

interface Confirmation {
  loginId: string;
  resolve: (done: boolean) => void;
}
/** Set while requests wait for the user to enter the API key again. */
export const confirmation = signal<Confirmation | undefined>(undefined);

async function fetchAsConsole(input: string | URL | Request, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  headers.set(...consoleHeader);
  const send = (): Promise<Response> => fetch(input, { ...init, headers, redirect: 'error' });
  let response = await send();
  if (response.status === 403 && (await isConfirmed(response))) response = await send();
  if (response.status === 401) loginEnded.value = true;
  return response;
}

/**
 * Handles an answer with status 403. If the broker requires the API key again, asks the user for it, and returns true
 * once it was entered. Also counts the answers that report a missing scope.
 */
async function isConfirmed(response: Response): Promise<boolean> {
  const { code, details } = failureOf(response, await response.clone().text());
  if (details.required_scope !== undefined) scopeRefusals.value += 1;
  return code === 'confirmation_required' && typeof details.login_id === 'string'
    ? confirmed(details.login_id)
    : false;
}

/**
 * Asks the user to enter the key again. Resolves with true once it was entered, or with false if the user cancels.
 * Requests that already wait for the key get the same result.
 */
function confirmed(loginId: string): Promise<boolean> {
  const waiting = confirmation.value;
  return new Promise((resolve) => {
    confirmation.value = {
      loginId,
      resolve(done) {
        waiting?.resolve(done);
        confirmation.value = undefined;
        resolve(done);
      },
    };
  });
}

/** Creates a client that sends an API key that was just entered. The broker then ignores the cookie of a login. */
export const clientWithKey = (apiKey: string): Farhand => new Farhand({ baseUrl: location.origin, apiKey });
export const client = new Farhand({ baseUrl: location.origin, fetch: fetchAsConsole });
/** A client for streams. It does not retry, so that the page soon reports that the broker does not answer. */
export const streams = new Farhand({ baseUrl: location.origin, fetch: fetchAsConsole, retries: 0 });

/** Creates a client that also reports the ETag of each answer, which the SDK's results do not contain. */
export function clientWithEtag(report: (etag: string | null) => void): Farhand {
  return new Farhand({
    baseUrl: location.origin,
    fetch: async (input, init) => {
      const response = await fetchAsConsole(input, init);
      if (response.ok) report(response.headers.get('etag'));
      return response;
    },
  });
}

/** Returns an error's message for the user. The broker's messages name the next step. */
export function messageOf(error: unknown): string {
  // Status 0 means that nothing answered. With another status, a proxy answered, and the error's message says so.
  if (error instanceof FarhandError && error.code === 'no_answer' && error.status === 0)
    return 'The broker does not answer. Check that it runs, then try again.';
  return error instanceof Error ? error.message : String(error);
}
