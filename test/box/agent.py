"""An agent in Python, written from docs/agent-protocol.md and the protos. Its methods are in agent_methods.py.

Usage: PYTHONPATH=GENERATED agent.py BROKER DATA_DIR [JOIN_TOKEN]
"""
import hashlib
import json
import os
import platform
import queue
import random
import signal
import socket
import ssl
import sys
import threading
import time
import uuid

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from farhand.link.v1 import link_pb2 as link
from farhand.link.v1 import link_pb2_grpc

from agent_methods import CHUNK_BYTES, CODE_OF, METHODS, REQUESTS_STREAM, UNARY, Failure, metrics, sync_directory

broker, data_dir = sys.argv[1:3]
join_token = (sys.argv[3:] or [''])[0]

VERSION = '0.1.0'
# The capabilities that the machine's owner allows. For some of them this agent has no method.
CAPABILITIES = ['metrics', 'files:read', 'files:write', 'exec', 'terminal', 'user']
REPLY_BYTES = 60 * 1024
# The broker waits up to 10 s for the first part of an answer.
REPLY_SECONDS = 1
OPEN_CALLS = 32
INSTANCE = uuid.uuid4().hex
stopping = threading.Event()


def log(**fields):
    print(json.dumps(fields), file=sys.stderr, flush=True)


def error_of(failure):
    if isinstance(failure, Failure):
        return link.Error(code=failure.code, message=str(failure), details=failure.details)
    if isinstance(failure, OSError):
        return link.Error(code=CODE_OF.get(failure.errno, 'internal_error'), message=str(failure))
    log(msg='a call failed', error=repr(failure))
    return link.Error(code='internal_error', message='unexpected failure, see the log')


# The link

class Link:
    """One connection to the broker, from its dial to its end."""

    def __init__(self, identity):
        self.identity = identity
        self.outgoing, self.over = queue.SimpleQueue(), threading.Event()
        self.calls = {}  # by call id: the stream of the answer, once the stream is open
        self.heard, self.silence, self.every = time.monotonic(), 10, None
        self.welcomed, self.wait, self.removed = False, None, False

    def send(self, **message):
        self.outgoing.put(link.ConnectRequest(**message))

    def run(self):
        # Large answers use a connection of their own.
        with channel(self.identity) as control, channel(self.identity) as bulk:
            self.answers = link_pb2_grpc.LinkStub(bulk)
            stream = link_pb2_grpc.LinkStub(control).Connect(iter(self.outgoing.get, None))
            threading.Thread(target=self.keep_alive, args=(stream,), daemon=True).start()
            try:
                for message in stream:
                    self.heard = time.monotonic()
                    kind = message.WhichOneof('message')
                    if handler := getattr(self, 'on_%s' % kind, None):
                        handler(getattr(message, kind))
            except grpc.RpcError as error:
                log(msg='link lost', status=error.code().name, details=error.details())
                if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.wait = 60
            finally:
                self.over.set()
                self.outgoing.put(None)

    def keep_alive(self, stream):
        beat = time.monotonic()
        while not self.over.wait(0.2):
            now = time.monotonic()
            if now - self.heard > self.silence:
                stream.cancel()
            if self.every and now - beat >= self.every:
                beat = now
                self.send(heartbeat=link.Heartbeat(metrics=metrics()))

    def on_challenge(self, challenge):
        identity = self.identity
        parts = (b'farhand-link-v1', challenge.nonce, identity['machine_id'].encode(), identity['ca_sha256'].encode())
        with open('/proc/sys/kernel/random/boot_id') as file:
            boot_id = file.read().strip()
        self.send(hello=link.Hello(
            machine_id=identity['machine_id'], protocol=1, agent_version=VERSION, boot_id=boot_id, instance_id=INSTANCE,
            signature=key_of(identity).sign(b''.join(bytes([len(part)]) + part for part in parts)), methods=list(METHODS),
            limits=link.Limits(frame_bytes=CHUNK_BYTES, open_calls=OPEN_CALLS, message_bytes=2 * 1024 * 1024),
            capabilities=CAPABILITIES, host=host(), metrics=metrics()))

    def on_welcome(self, welcome):
        self.welcomed = True
        self.every, self.silence = welcome.heartbeat_ms / 1000, welcome.silence_ms / 1000
        log(msg='linked', machine_id=self.identity['machine_id'])

    def on_call(self, call):
        self.calls[call.call_id] = None
        threading.Thread(target=self.answer, args=(call,), daemon=True).start()

    def on_cancel(self, cancel):
        stream = self.calls.get(cancel.call_id)
        if stream:
            stream.cancel()

    def on_drain(self, drain):
        self.wait = drain.retry_after_ms / 1000

    def on_fenced(self, fenced):
        log(msg='another agent uses this identity', reason=fenced.reason)
        self.wait = 30

    def on_removed(self, removed):
        log(msg='removed', reason=removed.reason)
        self.removed = True

    def answer(self, call):
        try:
            if len(self.calls) > 2 * OPEN_CALLS:
                raise Failure('unavailable', 'too many calls are open on this machine')
            if call.method not in METHODS:
                raise Failure('not_supported', 'this agent does not have ' + call.method)
            request_type, method = METHODS[call.method]
            if call.method in REQUESTS_STREAM or call.request_follows:
                return self.stream(call, request_type, method)
            responses = method(request_type.FromString(call.request))
            if call.method in UNARY:
                return self.send(reply=link.Reply(call_id=call.call_id, response=next(responses).SerializeToString()))
            self.reply_or_stream(call, responses)
        except grpc.RpcError as error:
            log(msg='answer cut', method=call.method, status=error.code().name)
        except Exception as failure:
            self.send(reply=link.Reply(call_id=call.call_id, error=error_of(failure)))
        finally:
            del self.calls[call.call_id]

    def reply_or_stream(self, call, responses):
        first, size, began = [], 0, time.monotonic()
        for response in responses:
            first.append(response.SerializeToString())
            size += len(first[-1])
            if size > REPLY_BYTES or time.monotonic() - began > REPLY_SECONDS:
                return self.stream(call, None, lambda _: responses, first)
        self.send(reply=link.Reply(call_id=call.call_id, messages=link.Messages(messages=first)))

    def stream(self, call, request_type, method, first=()):
        outgoing = queue.Queue(2)
        metadata, timeout = (('farhand-call', call.call_id),), call.deadline_ms / 1000 or None
        stream = self.calls[call.call_id] = self.answers.Answer(iter(outgoing.get, None), metadata=metadata, timeout=timeout)

        def send(frame):
            while stream.is_active():
                try:
                    return outgoing.put(frame, timeout=0.5)
                except queue.Full:
                    pass
            raise Failure('unavailable', 'the call is over')

        try:
            for message in first:
                send(link.AnswerRequest(message=message))
            requests = requests_in(stream, request_type)
            request = next(requests) if call.request_follows and call.method not in REQUESTS_STREAM else requests
            for response in method(request):
                send(link.AnswerRequest(message=response.SerializeToString()))
            send(link.AnswerRequest(end=link.End()))
        except Exception as failure:
            if stream.is_active():
                send(link.AnswerRequest(error=error_of(failure)))
        finally:
            if stream.is_active():
                send(None)
            # The broker ends the stream after the agent has ended its side. Reads until then.
            for _ in stream:
                pass


def requests_in(stream, request_type):
    for frame in stream:
        kind = frame.WhichOneof('frame')
        if kind == 'end':
            return
        if kind == 'error':
            raise Failure(frame.error.code, frame.error.message)
        if kind == 'message':
            yield request_type.FromString(frame.message)
    raise Failure('unavailable', 'the requests stopped without End')


# Joining

def host():
    arch = {'x86_64': 'x64', 'aarch64': 'arm64'}.get(platform.machine(), platform.machine())
    return link.HostFacts(hostname=socket.gethostname(), os='linux', arch=arch)


def channel(identity):
    options = [('grpc.ssl_target_name_override', 'farhand-broker'), ('grpc.use_local_subchannel_pool', 1),
               ('grpc.enable_http_proxy', 0), ('grpc.keepalive_time_ms', 20_000)]
    return grpc.secure_channel(broker, grpc.ssl_channel_credentials(identity['ca'].encode()), options)


def authority():
    """The last certificate of the broker's chain, as DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(['h2'])
    address, port = broker.rsplit(':', 1)
    with socket.create_connection((address, int(port)), 10) as plain:
        with context.wrap_socket(plain, server_hostname='farhand-broker') as tls:
            if hasattr(tls, 'get_unverified_chain'):  # Python 3.13
                return tls.get_unverified_chain()[-1]
            return ssl.PEM_cert_to_DER_cert(tls._sslobj.get_unverified_chain()[-1].public_bytes())


def key_of(identity):
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(identity['private_key']))


def store(identity):
    path = os.path.join(data_dir, 'identity.json')
    with open(path + '.new', 'w', opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(identity, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + '.new', path)
    sync_directory(data_dir)


def identify():
    """Returns the identity in the data directory. Joins with the token if there is no identity."""
    os.makedirs(data_dir, 0o700, exist_ok=True)
    path = os.path.join(data_dir, 'identity.json')
    identity = {}
    if os.path.exists(path):
        with open(path) as file:
            identity = json.load(file)
    if 'machine_id' in identity:
        return identity
    secret, ca_sha256 = join_token[len('farhand_join_'):].split('.')[:2]
    if identity.get('ca_sha256') != ca_sha256:
        ca = authority()
        if hashlib.sha256(ca).hexdigest() != ca_sha256:
            sys.exit('another broker answers at %s: its authority is not the one of the join token' % broker)
        private = Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        identity = {'ca': ssl.DER_cert_to_PEM_cert(ca), 'ca_sha256': ca_sha256, 'private_key': private.hex()}
        store(identity)
    public = key_of(identity).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    request = link.EnrollRequest(token=secret, public_key=public, name=socket.gethostname(), host=host(), agent_version=VERSION)
    ceiling = 0.5
    while True:
        try:
            with channel(identity) as connection:
                identity['machine_id'] = link_pb2_grpc.LinkStub(connection).Enroll(request, timeout=10).machine_id
            store(identity)
            return identity
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
                sys.exit('the broker refused this machine: ' + error.details())
            log(msg='joining failed', status=error.code().name, details=error.details())
            stopping.wait(60 if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED else random.random() * ceiling)
            ceiling = min(30, 2 * ceiling)


def main():
    identity, ceiling, current = identify(), 0.5, None

    def stop(*_):
        stopping.set()
        if current:
            current.send(farewell=link.Farewell())
            current.outgoing.put(None)

    signal.signal(signal.SIGTERM, stop)
    while not stopping.is_set():
        current = Link(identity)
        current.run()
        if current.removed:
            sys.exit('this machine was removed from its broker')
        ceiling = 0.5 if current.welcomed else min(30, 2 * ceiling)
        stopping.wait(random.random() * ceiling if current.wait is None else current.wait)


main()
