// The open connections of the HTTP port: how many there may be, and who goes when there are too many.
import type { Socket } from 'node:net';

export interface CrowdLimits {
  /** Connections open at once. */
  connections: number;
  /** Those of them that have not shown a good key yet. */
  strangers: number;
}

export interface Crowd {
  /** The newcomer is served: whoever is dispensable goes instead, if anybody is. */
  arrive(socket: Socket): void;
  /** A request has come over this connection. The result: it has had its answer. Undefined: too many wait, it is cut. */
  ask(socket: Socket): (() => void) | undefined;
  /** A good key was shown there. */
  know(socket: Socket): void;
  /** What lies under a connection that TLS could not be agreed on with. */
  below(socket: Socket): Socket | undefined;
}

/** Requests that may wait on one connection: programs send the next after an answer, and none sends so many at once. */
const pipelined = 16;

interface Member {
  socket: Socket;
  known: boolean;
  /** Requests under way. */
  open: number;
}

export function openCrowd(limits: CrowdLimits): Crowd {
  const members = new Map<string, Member>();
  // In the order of who last asked or was answered.
  const strangers = new Map<string, Member>();
  const idle = new Map<string, Member>();

  /** At the end of the line of its kind; whoever is known and waits for an answer stands in none. */
  const place = (peer: string, member: Member): void => {
    strangers.delete(peer);
    idle.delete(peer);
    if (!member.known) strangers.set(peer, member);
    else if (member.open === 0) idle.set(peer, member);
  };
  const forget = (peer: string): void => {
    for (const line of [members, strangers, idle]) line.delete(peer);
  };
  const cutFirst = (line: Map<string, Member>): boolean => {
    const [first] = line;
    if (!first) return false;
    forget(first[0]);
    first[1].socket.destroy();
    return true;
  };
  const change = (socket: Socket, how: (member: Member) => void): void => {
    const peer = peerOf(socket);
    const member = members.get(peer);
    if (!member) return;
    how(member);
    place(peer, member);
  };
  return {
    arrive(socket) {
      if (strangers.size >= limits.strangers) cutFirst(strangers);
      const room = members.size < limits.connections || cutFirst(strangers) || cutFirst(idle);
      if (!room) return void socket.destroy();
      const peer = peerOf(socket);
      const member = { socket, known: false, open: 0 };
      members.set(peer, member);
      place(peer, member);
      socket.once('close', () => {
        if (members.get(peer) === member) forget(peer);
      });
    },
    ask(socket) {
      if ((members.get(peerOf(socket))?.open ?? 0) >= pipelined) return cutShort(socket);
      change(socket, (member) => {
        member.open += 1;
      });
      return () =>
        change(socket, (member) => {
          member.open -= 1;
        });
    },
    know: (socket) =>
      change(socket, (member) => {
        member.known = true;
      }),
    below: (socket) => members.get(peerOf(socket))?.socket,
  };
}

/**
 * Cuts a connection and leaves the rest of what was read from it: one read may hold 1,800 requests, each of which Node
 * would take up and fail, 50 ms of everybody's time. To call the next one an upgrade is what ends its parser, which is
 * not in its types; where there is none of that shape, cutting only takes longer.
 */
function cutShort(socket: Socket & { parser?: { onIncoming?: () => number } | null }): undefined {
  const isUpgrade = 2;
  if (socket.parser) socket.parser.onIncoming = () => isUpgrade;
  socket.destroy();
}

/** With TLS the connection that arrives and the one that asks are two objects, with the same two ends. */
function peerOf({ remoteAddress, remotePort, localAddress, localPort }: Socket): string {
  return `${remoteAddress} ${remotePort} ${localAddress} ${localPort}`;
}
