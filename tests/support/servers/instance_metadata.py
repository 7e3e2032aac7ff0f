"""A mock of the instance metadata services of AWS (IMDSv2) and Google: what they answer, over real HTTP."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a-token"


class MetadataMock:
    """Mock of one machine's metadata service, without a notice until :meth:`take_back`."""

    def __init__(self):
        self.seconds, self.is_token_known, self.num_tokens = None, True, 0
        self.raw = b""  # bytes that are sent in place of any answer to a GET
        handler = type("Handler", (_Handler,), {"mock": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take_back(self, seconds):
        """Announce a preemption in ``seconds``."""
        self.until = datetime.now(UTC) + timedelta(seconds=seconds)
        self.seconds = seconds

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    mock: MetadataMock

    def log_message(self, *_args):
        pass

    def do_PUT(self):
        # IMDSv2: no answer without a token, which a PUT gives
        wants = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if self.path != "/latest/api/token" or not wants:
            return self._answer(400, "")
        self.mock.num_tokens += 1
        self.mock.is_token_known = True
        return self._answer(200, TOKEN)

    def do_GET(self):
        if self.mock.raw:
            return self.wfile.write(self.mock.raw)
        # Google's service tells clients from browsers by a header
        if self.path == "/computeMetadata/v1/instance/preempted":
            if self.headers.get("Metadata-Flavor") != "Google":
                return self._answer(403, "")
            return self._answer(200, "TRUE" if self.mock.seconds else "FALSE")
        token = self.headers.get("X-aws-ec2-metadata-token")
        if token != TOKEN or not self.mock.is_token_known:
            return self._answer(401, "")
        if self.path != "/latest/meta-data/spot/instance-action" or self.mock.seconds is None:
            return self._answer(404, "")
        at = self.mock.until.strftime("%Y-%m-%dT%H:%M:%SZ")
        return self._answer(200, json.dumps({"action": "terminate", "time": at}))

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def metadata_mock():
    mock = MetadataMock()
    try:
        yield mock
    finally:
        mock.close()
