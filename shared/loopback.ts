// Recognizes loopback addresses, to which only this machine can connect, in settings and in URL.hostname.
export function isLoopback(host: string): boolean {
  return /^(localhost|127(\.\d{1,3}){3}|::1|\[::1\])$/.test(host);
}
