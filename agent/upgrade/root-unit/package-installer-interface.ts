// The interface by which the upgrade unit replaces a program. Each kind of package implements it.

/** Directory names of the previous and the new version in /opt/farhand-agent; empty for a Debian package. */
export interface VersionNames {
  before: string;
  after: string;
}

export interface Installer {
  /** The command that starts the installed version. */
  readonly command: string;
  /**
   * Prepares the new version without replacing the installed one. Throws if the package does not contain the new
   * version.
   */
  prepare(version: string): Promise<VersionNames>;
  /** Replaces the installed version by the new one. Repeated calls do no harm. */
  forward(names: VersionNames): Promise<void>;
  /** Restores the previous version. Repeated calls do no harm. */
  back(names: VersionNames): Promise<void>;
  /** Removes what an interrupted prepare() has left, and the versions before the previous one. */
  sweep(): Promise<void>;
}
