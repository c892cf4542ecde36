// Whether a host is this very machine, as a host of a setting or as URL.hostname has it.
export function isLoopback(host: string): boolean {
  return /^(localhost|127(\.\d{1,3}){3}|::1|\[::1\])$/.test(host);
}
