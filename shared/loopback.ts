// Recognizes loopback addresses, as written in settings and in URL.hostname. Only this machine can connect to them.
export function isLoopback(host: string): boolean {
  return /^(localhost|127(\.\d{1,3}){3}|::1|\[::1\])$/.test(host);
}
