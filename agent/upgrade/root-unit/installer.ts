// What root's upgrade unit needs to replace a program, whatever kind of package it is from.

/** Names of the version before and the new one below /opt/farhand-agent; empty for a Debian package. */
export interface VersionNames {
  before: string;
  after: string;
}

export interface Installer {
  /** The command that starts the installed version. */
  readonly command: string;
  /** Makes the new version ready without replacing the installed one. Throws if it is not what it should be. */
  prepare(version: string): Promise<VersionNames>;
  /** Replaces the installed version by the new one. May be repeated. */
  forward(names: VersionNames): Promise<void>;
  /** Puts the version before in place again. May be repeated. */
  back(names: VersionNames): Promise<void>;
  /** Removes what neither the running version nor a return to the version before needs. */
  sweep(running: string): Promise<void>;
}
