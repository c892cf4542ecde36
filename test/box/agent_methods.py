"""What agent.py can do on its machine: metrics, listing, reading and writing, as agent.proto describes them."""
import errno
import grp
import hashlib
import json
import os
import pwd
import stat
import tempfile
import time

from farhand.agent.v1 import agent_pb2 as machine

CHUNK_BYTES = 256 * 1024
STARTED = time.monotonic()


class Failure(Exception):
    def __init__(self, code, message, **details):
        super().__init__(message)
        self.code, self.details = code, json.dumps(details)


CODES = {
    'file_not_found': 'ENOENT', 'permission_denied': 'EACCES EPERM EROFS', 'already_exists': 'EEXIST',
    'directory_not_empty': 'ENOTEMPTY', 'not_a_directory': 'ENOTDIR', 'is_a_directory': 'EISDIR',
    'invalid_path': 'ENAMETOOLONG ELOOP EILSEQ EINVAL', 'unsupported_file': 'ENXIO ENODEV', 'no_space': 'ENOSPC EDQUOT EMLINK',
    'file_too_large': 'EFBIG', 'file_busy': 'EBUSY ETXTBSY', 'conflict': 'ESTALE', 'not_supported': 'EXDEV EOPNOTSUPP',
    'io_error': 'EIO EUCLEAN', 'unavailable': 'EMFILE ENFILE',
}
CODE_OF = {getattr(errno, name): code for code, names in CODES.items() for name in names.split()}


# Metrics

last_cpu = (0, 0)


def metrics():
    global last_cpu
    with open('/proc/stat') as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    before, last_cpu = last_cpu, (sum(times), sum(times) - times[3] - times[4])
    total, busy = last_cpu[0] - before[0], last_cpu[1] - before[1]
    with open('/proc/meminfo') as file:
        memory = {line.split(':')[0]: int(line.split()[1]) * 1024 for line in file}
    disk = os.statvfs('/')
    return machine.Metrics(
        recorded_at_ms=int(time.time() * 1000), uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME),
        cpu_usage=min(100, max(0, 100 * busy / total)) if total > 0 else 0, cpu_cores=os.cpu_count(),
        memory=space(memory['MemTotal'], memory['MemAvailable']), load_average=os.getloadavg(),
        disk=space(disk.f_blocks * disk.f_frsize, disk.f_bfree * disk.f_frsize, disk.f_bavail * disk.f_frsize),
        agent_uptime_s=time.monotonic() - STARTED)


def space(total, free, available=None):
    return machine.Space(total=total, used=total - free, free=free, available=available)


def get_metrics(_request):
    yield machine.GetMetricsResponse(metrics=metrics())


# Files

def absolute(path):
    if b'\0' in path:
        raise Failure('invalid_path', 'a path cannot hold a zero byte')
    if path == b'~' or path.startswith(b'~/'):
        path = path[1:].lstrip(b'/')
    return os.path.abspath(os.path.join(os.path.expanduser(b'~'), path))


def name_of(find, number):
    try:
        return find(number)[0]
    except KeyError:
        return str(number)


SPECIAL = {stat.S_IFIFO: 'fifo', stat.S_IFSOCK: 'socket', stat.S_IFBLK: 'block', stat.S_IFCHR: 'char'}


def entry_of(path):
    found, target = os.lstat(path), None
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(path)
        if os.path.exists(path):
            found = os.stat(path)
    directory = stat.S_ISDIR(found.st_mode)
    return machine.FileEntry(
        name=os.path.basename(path), path=path, size=found.st_size, mode=stat.S_IMODE(found.st_mode), link_target=target,
        type=machine.FILE_TYPE_DIRECTORY if directory else machine.FILE_TYPE_FILE, modified_at_ms=found.st_mtime_ns // 10**6,
        owner=name_of(pwd.getpwuid, found.st_uid), group=name_of(grp.getgrgid, found.st_gid),
        special=SPECIAL.get(stat.S_IFMT(found.st_mode), ''))


def etag_of(found):
    parts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return '"%s"' % '-'.join(format(part, 'x') for part in parts)


def list_files(request):
    path = absolute(request.path)
    names = [name for name in os.listdir(path) if request.hidden or not name.startswith(b'.')]
    names.sort(key=lambda name: (not os.path.isdir(os.path.join(path, name)), name))
    yield machine.ListFilesResponse(head=machine.ListFilesHead(path=path, total=len(names)))
    names = names[request.offset:request.offset + request.limit if request.limit else None]
    for at in range(0, len(names), 256):
        entries = []
        for name in names[at:at + 256]:
            try:
                entries.append(entry_of(os.path.join(path, name)))
            except FileNotFoundError:
                pass
        yield machine.ListFilesResponse(batch=machine.FileEntries(entries=entries))


def read_file(request):
    path = absolute(request.path)
    # With O_NONBLOCK, opening a FIFO does not wait for a writer.
    with open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Failure('unsupported_file', 'not a regular file')
        size = found.st_size
        start = request.offset if request.offset >= 0 else max(0, size + request.offset)
        if start > size:
            raise Failure('range_not_satisfiable', 'the file has %d bytes' % size, size=size)
        left = request.length if request.HasField('length') else 2**63
        # Files of /proc report a size of 0, but may have content.
        known = size > 0
        left = min(left, size - start) if known else left
        if known and 0 < request.max_bytes < left:
            raise Failure('file_too_large', 'more than %d bytes' % request.max_bytes)
        yield machine.ReadFileResponse(head=machine.ReadFileHead(
            entry=entry_of(path), etag=etag_of(found), offset=start, length=left if known else None))
        file.seek(start)
        digest, sent = hashlib.sha256(), 0
        while chunk := file.read(min(CHUNK_BYTES, left)):
            left -= len(chunk)
            sent += len(chunk)
            if 0 < request.max_bytes < sent:
                raise Failure('file_too_large', 'more than %d bytes' % request.max_bytes)
            digest.update(chunk)
            yield machine.ReadFileResponse(chunk=chunk)
        if known and (left > 0 or etag_of(os.fstat(file.fileno())) != etag_of(found)):
            raise Failure('conflict', 'the file changed while it was read')
        if request.digest:
            yield machine.ReadFileResponse(tail=machine.ReadFileTail(sha256=digest.hexdigest()))


def write_file(requests):
    opening = next(requests, machine.WriteFileRequest()).open
    requested = absolute(opening.path)
    path = os.path.realpath(requested)
    replaceable(path, opening, not opening.HasField('overwrite') or opening.overwrite)
    folder = os.path.dirname(path)
    if opening.create_parents:
        os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=b'.farhand-', dir=folder)
    try:
        with os.fdopen(handle, 'wb') as file:
            commit, digest = received(requests, file)
            before = replaceable(path, opening, commit.overwrite)
            mode = commit.mode if commit.HasField('mode') else stat.S_IMODE(before.st_mode) if before else 0o644
            file.flush()
            if before:
                os.fchown(handle, before.st_uid, before.st_gid)
            os.fchmod(handle, mode)
            os.fsync(handle)
        # If the path exists now, a rename replaces the file, and a hard link fails.
        (os.rename if commit.overwrite else os.link)(temporary, path)
        sync_directory(folder)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    found = os.stat(path)
    yield machine.WriteFileResponse(path=requested, size=found.st_size, created=before is None, sha256=digest,
                                    etag=etag_of(found), entry=entry_of(requested))


def replaceable(path, opening, overwrite):
    """Returns the stats of an existing file, or None. Refuses a file that must not be replaced."""
    found = os.stat(path) if os.path.exists(path) else None
    if found and stat.S_ISDIR(found.st_mode):
        raise Failure('is_a_directory', 'is a directory')
    if found and not stat.S_ISREG(found.st_mode):
        raise Failure('unsupported_file', 'not a regular file')
    if found and not overwrite:
        raise Failure('already_exists', 'the path exists')
    if opening.HasField('if_match'):
        wanted = [one.strip() for one in opening.if_match.split(',')]
        if not found or not {'*', etag_of(found)}.intersection(wanted):
            raise Failure('precondition_failed', 'the file is not the one that if_match names')
    return found


def received(requests, file):
    """Writes all chunks. Returns the commit after the end of the stream. Before that, a commit does not count."""
    commit, digest = None, hashlib.sha256()
    for request in requests:
        if commit or not request.WhichOneof('part') in ('chunk', 'commit'):
            raise Failure('invalid_request', 'open must be followed by chunks and then by one commit')
        file.write(request.chunk)
        digest.update(request.chunk)
        commit = request.commit if request.HasField('commit') else None
    if not commit:
        raise Failure('invalid_request', 'the upload ended without commit')
    if commit.HasField('sha256') and commit.sha256.lower() != digest.hexdigest():
        raise Failure('validation_failed', 'sha256 does not match the bytes that arrived')
    return commit, digest.hexdigest()


def sync_directory(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# Methods by name. Each takes its request, or an iterator of requests, and yields its responses.
METHODS = {
    'GetMetrics': (machine.GetMetricsRequest, get_metrics),
    'ListFiles': (machine.ListFilesRequest, list_files),
    'ReadFile': (machine.ReadFileRequest, read_file),
    'WriteFile': (machine.WriteFileRequest, write_file),
}
UNARY, REQUESTS_STREAM = {'GetMetrics'}, {'WriteFile'}
