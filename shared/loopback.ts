// Checks if a host, from a setting or URL.hostname, is a loopback address: only this machine can connect to it.
export function isLoopback(host: string): boolean {
  return /^(localhost|127(\.\d{1,3}){3}|::1|\[::1\])$/.test(host);
}
