"""A proxy before an S3 service that fails on cue: it knows which request of a save it has before it."""

import socket
import threading
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.s3_server import HOST

STALL_S = 3.0
STAGES = ("begin", "part", "complete", "file", "manifest")
KINDS = ("503", "stall", "drop", "lost answer")
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


def stage_of(method: str, target: str) -> str:
    """Return the stage of a save to which a request belongs; empty for a read."""
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    if method == "POST" and "uploads" in query:
        return "begin"
    if method == "POST" and "uploadId" in query:
        return "complete"
    if method != "PUT":
        return ""
    if "partNumber" in query:
        return "part"
    return "manifest" if url.path.endswith(".json") else "file"


class FaultyService:
    """Proxy that fails the next ``num_left`` requests of ``stage`` with a fault of ``kind``."""

    def __init__(self, endpoint: str) -> None:
        self.upstream = int(endpoint.rpartition(":")[2])
        self._lock = threading.Lock()
        self._stage, self._kind, self.num_left = "", "", 0
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(
            (HOST, 0), type("Handler", (_Handler,), {"service": self})
        )
        self._server.daemon_threads = True
        self.endpoint = f"http://{HOST}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def fail(self, stage: str, kind: str, *, times: int) -> None:
        self._stage, self._kind, self.num_left = stage, kind, times

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, stage: str) -> str:
        with self._lock:
            if stage != self._stage or self.num_left == 0:
                return ""
            self.num_left -= 1
            return self._kind


class _Handler(BaseHTTPRequestHandler):
    service: FaultyService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def _serve(self):
        kind = self.service.take(stage_of(self.command, self.path))
        length = int(self.headers.get("Content-Length") or 0)
        # a dropped connection ends in the middle of the body
        body = self.rfile.read(length // 2 if kind == "drop" else length)
        if kind == "503":
            return self._answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
        if kind == "stall":
            self.service.released.wait(STALL_S)
        if kind in ("stall", "drop"):
            return self._hang_up()
        status, headers, answer = self._ask(body)
        # the service has done it, and the client never learns
        if kind == "lost answer":
            return self._hang_up()
        return self._answer(status, headers, answer)

    def _ask(self, body):
        upstream = HTTPConnection(HOST, self.service.upstream, timeout=200)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
        upstream.request(self.command, self.path, body=body or None, headers=headers)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        return answer.status, dict(answer.getheaders()), data

    def _answer(self, status, headers, data):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", headers.get("content-length"))
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", str(length if is_head and length else len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _hang_up(self):
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
    setattr(_Handler, f"do_{method}", _Handler._serve)


@contextmanager
def faulty_service(endpoint: str):
    service = FaultyService(endpoint)
    try:
        yield service
    finally:
        service.close()
