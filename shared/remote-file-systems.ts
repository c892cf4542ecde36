// The types of file systems that are on a file server.

/** Matches the types, as in /proc/self/mountinfo, of file systems on a file server, or of a program that may use one. */
export const remoteFileSystems =
  /^(nfs4?|cifs|smb3|ceph|glusterfs|lustre|afs|gpfs|fuse\.(?!gvfsd|portal|lxcfs|snapfuse).+)$/;
