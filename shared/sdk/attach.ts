// Opens the terminal of an attach: a WebSocket, where this client has reached its broker.
import type { Route } from '../api/route.ts';
import { type Connection, socketUrl } from './request.ts';
import type { Attached } from './shape.ts';
import { openTerminal, type Terminal, type TerminalSettings } from './terminal.ts';

export async function attachTerminal(
  to: Connection,
  route: Route,
  attached: Attached,
  settings: TerminalSettings = {},
): Promise<Terminal> {
  return openTerminal(to.webSocket(socketUrl(to, route, attached)), settings);
}
