"""An S3 service for tests: moto's server in a process of its own, and a proxy that fails on cue."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3

from tests.support.servers.ports import free_port

HOST = "127.0.0.1"
SERVER = Path(__file__).with_name("moto_one_at_a_time.py")
ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "planted-secret-0123456789"
BUCKET = "runs"


def environment(
    endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY
) -> dict[str, str]:
    """Return the environment variables of a client, which hide the machine's own AWS settings."""
    return {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


@contextmanager
def exported(values: Mapping[str, str]) -> Iterator[None]:
    """``values`` in this process's environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def moto_server(bucket: str = BUCKET) -> Iterator[str]:
    """The endpoint of a service that lives in memory, with one empty bucket."""
    port = free_port()
    command = [sys.executable, str(SERVER), "-H", HOST, "-p", str(port)]
    # a process of its own, as moto and the code under test share boto3's state
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_open(port, timeout_s=200)
        endpoint = f"http://{HOST}:{port}"
        # as an administrator does before the first run
        raw_client(endpoint).create_bucket(Bucket=bucket)
        yield endpoint
    finally:
        process.kill()
        process.wait(100)


def raw_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY):
    """A client beside the code under test."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
    )


def wait_until_open(port: int, *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((HOST, port), 10).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


class TearingProxy:
    """Passes bytes to a service; the first ``num_tears`` answers above ``limit`` bytes are cut."""

    def __init__(self, endpoint: str, *, limit: int, num_tears: int) -> None:
        self._upstream = int(endpoint.rpartition(":")[2])
        self._limit, self.num_left = limit, num_tears
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"http://{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((HOST, self._upstream))
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
                threading.Thread(target=self._tear, args=(far, near), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        _shut(source, sink)

    def _tear(self, source: socket.socket, sink: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                # cut in the middle of an answer, some times
                if passed > self._limit and self._takes_tear():
                    break
                sink.sendall(data)
        _shut(source, sink)

    def _takes_tear(self) -> bool:
        with self._lock:
            self.num_left -= 1
            return self.num_left >= 0


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
