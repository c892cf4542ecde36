// The types of file systems that are on a file server.

/**
 * Matches a type of file system, as named in /proc/self/mountinfo, whose data is on a file server. Also matches FUSE
 * types (`fuse.…`) unless they are known to be local, because the program behind a FUSE file system may use a server.
 */
export const remoteFileSystems =
  /^(nfs4?|cifs|smb3|ceph|glusterfs|lustre|afs|gpfs|fuse\.(?!gvfsd|portal|lxcfs|snapfuse).+)$/;
