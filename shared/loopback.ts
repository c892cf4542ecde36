// Checks whether a host, from a setting or URL.hostname, is this machine itself.
export function isLoopback(host: string): boolean {
  return /^(localhost|127(\.\d{1,3}){3}|::1|\[::1\])$/.test(host);
}
