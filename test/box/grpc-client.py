"""A client of the gRPC streams that is made from client.proto alone, as a program in another language would be.

Usage: grpc-client.py GENERATED ADDRESS CA KEY MACHINE SESSION FILE
"""
import hashlib
import json
import queue
import sys

generated, address, ca, key, machine, session, path = sys.argv[1:]
sys.path.insert(0, generated)

import grpc  # noqa: E402
from farhand.client.v1 import client_pb2 as pb  # noqa: E402
from farhand.client.v1 import client_pb2_grpc as rpc  # noqa: E402

with open(ca, 'rb') as file:
    credentials = grpc.ssl_channel_credentials(file.read())
options = [('grpc.ssl_target_name_override', 'farhand-broker')]
channel = grpc.secure_channel(address, credentials, options)
streams = rpc.StreamsStub(channel)
metadata = [('authorization', 'Bearer ' + key)]
result = {}

events = streams.Events(pb.EventsRequest(types=['command.*']), metadata=metadata)
events.initial_metadata()

text = ('over and over ' * 100_000).encode()
requests = [pb.ExecRequest(start=pb.ExecStart(machine_id=machine, command='cat; echo done >&2; exit 3'))]
requests += [pb.ExecRequest(stdin=text[at:at + 500_000]) for at in range(0, len(text), 500_000)]
out, err = b'', b''
for answer in streams.Exec(iter(requests), metadata=metadata):
    kind = answer.WhichOneof('message')
    if kind == 'accepted':
        command = answer.accepted.command_id
    elif kind == 'output':
        if answer.output.stream == pb.OUTPUT_STREAM_STDOUT:
            out += answer.output.data
        else:
            err += answer.output.data
    elif kind == 'end':
        result['exec'] = [out == text, err.decode(), answer.end.status, answer.end.exit_code]

follow = pb.FollowCommandRequest(command_id=command, stdout_offset=len(text) - 5)
result['follow'] = [
    answer.output.data.decode() if answer.HasField('output') else answer.end.status
    for answer in streams.FollowCommand(follow, metadata=metadata)
    if not (answer.HasField('output') and answer.output.stream == pb.OUTPUT_STREAM_STDERR)
]

result['events'] = []
for event in events:
    result['events'].append([event.type, json.loads(event.data)['command_id'] == command])
    if len(result['events']) == 2:
        break
events.cancel()

chunks = [pb.WriteFileRequest(open=pb.WriteFileOpen(machine_id=machine, path=path, mode='640'))]
chunks += [pb.WriteFileRequest(chunk=text[at:at + 300_000]) for at in range(0, len(text), 300_000)]
commit = pb.WriteFileCommit(sha256=hashlib.sha256(text).hexdigest())
written = streams.WriteFile(iter(chunks + [pb.WriteFileRequest(commit=commit)]), metadata=metadata)
result['write'] = [written.size, written.created]

head, *rest = streams.ReadFile(pb.ReadFileRequest(machine_id=machine, path=path, offset=-100), metadata=metadata)
result['read'] = [head.head.length, b''.join(part.chunk for part in rest) == text[-100:]]

keys = queue.SimpleQueue()
keys.put(pb.AttachSessionRequest(open=pb.AttachOpen(session_id=session)))
seen, end = b'', None
for answer in streams.AttachSession(iter(keys.get, None), metadata=metadata):
    if answer.HasField('attached'):
        keys.put(pb.AttachSessionRequest(input=b'echo $((40 + 2)); exit 5\n'))
    seen += answer.output
    if answer.HasField('end'):
        end = answer.end.exit_code
keys.put(None)
result['attach'] = [b'42' in seen, end]

try:
    list(streams.ReadFile(pb.ReadFileRequest(machine_id=machine, path=path + '.not'), metadata=metadata))
except grpc.RpcError as error:
    trailers = dict(error.trailing_metadata())
    result['refused'] = [error.code().name, trailers['farhand-code'], json.loads(trailers['farhand-details'])['path']]

print(json.dumps(result))
