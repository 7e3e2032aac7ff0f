"""A second real S3 service for tests: OpenStack Swift with its S3 front, four processes over a folder."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.servers.ports import free_port
from tests.support.servers.s3_server import HOST, wait_until_open

ACCOUNT, SECRET_KEY = "AK", "planted-swift-secret"
ACCESS_KEY = f"{ACCOUNT}:{ACCOUNT}"
STORES = ("account", "container", "object")
_HASH = "[swift-hash]\nswift_hash_path_suffix = tests\nswift_hash_path_prefix = tests\n"
_PIPELINE = (
    "catch_errors gatekeeper healthcheck proxy-logging cache listing_formats s3api tempauth copy slo dlo "
    "versioned_writes symlink proxy-logging proxy-server"
)
_FILTERS = (
    "catch_errors", "gatekeeper", "healthcheck", "proxy-logging:proxy_logging", "cache:memcache",
    "listing_formats", "s3api", "copy", "slo", "dlo", "versioned_writes", "symlink",
)  # fmt: skip
_LAUNCH = """
import sys
import eventlet
eventlet.monkey_patch()
from swift.common import utils
utils.config.SWIFT_CONF_FILE = utils.SWIFT_CONF_FILE = sys.argv[1]
from swift.common.wsgi import run_wsgi
sys.exit(run_wsgi(sys.argv[2], sys.argv[3]))
"""

_RING = "import sys; from swift.cli.ringbuilder import main; del sys.argv[0]; main(sys.argv)"


class SwiftServer:
    """Swift service in ``folder``: one proxy, one account, container and object server, one replica."""

    keys = (ACCESS_KEY, SECRET_KEY)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("proxy", *STORES)}
        self._processes: dict[str, subprocess.Popen] = {}

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.ports['proxy']}"

    def start(self) -> None:
        """Write the settings and the rings, then start all four."""
        (self.folder / "disk" / "d1").mkdir(parents=True)
        (self.folder / "swift.conf").write_text(_HASH)
        for store in STORES:
            self._write_store(store)
            self._build_ring(store)
        (self.folder / "proxy.conf").write_text(self._proxy_settings())
        # the proxy last: it asks the others
        for name in (*STORES, "proxy"):
            self.start_one(name)

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start_one(self, name: str) -> None:
        """Start ``proxy``, ``account``, ``container`` or ``object`` and wait until it answers."""
        # a session of its own, so that kill reaches its workers
        log = (self.folder / f"{name}.log").open("ab")
        settings = str(self.folder / f"{name}.conf")
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(self.folder / "swift.conf"), settings, f"{name}-server"],
            stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )  # fmt: skip
        wait_until_open(self.ports[name], timeout_s=200)

    def kill(self, name: str) -> None:
        """SIGKILL to a server and its workers."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(100)

    def _write_store(self, store: str) -> None:
        (self.folder / f"{store}.conf").write_text(
            f"[DEFAULT]\nbind_ip = {HOST}\nbind_port = {self.ports[store]}\nworkers = 0\n"
            f"user = {_user()}\nswift_dir = {self.folder}\ndevices = {self.folder}/disk\n"
            "mount_check = false\nlog_name = swift\n"
            f"[pipeline:main]\npipeline = {store}-server\n"
            f"[app:{store}-server]\nuse = egg:swift#{store}\n"
        )

    def _build_ring(self, store: str) -> None:
        """Build a ring in a process of its own: Swift imports eventlet, which does not tolerate later forks."""
        place = f"r1z1-{HOST}:{self.ports[store]}/d1"
        builder = str(self.folder / f"{store}.builder")
        for words in (("create", "6", "1", "1"), ("add", place, "1"), ("rebalance",)):
            subprocess.run(
                [sys.executable, "-c", _RING, "swift-ring-builder", builder, *words],
                check=True, capture_output=True, timeout=200,
            )  # fmt: skip

    def _proxy_settings(self) -> str:
        filters = (each.partition(":") for each in _FILTERS)
        sections = "".join(
            f"[filter:{name}]\nuse = egg:swift#{egg or name}\n" for name, _, egg in filters
        )
        return (
            f"[DEFAULT]\nbind_ip = {HOST}\nbind_port = {self.ports['proxy']}\nworkers = 0\n"
            f"user = {_user()}\nswift_dir = {self.folder}\nlog_name = swift\n"
            f"[pipeline:main]\npipeline = {_PIPELINE}\n"
            "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n"
            # tests kill servers: the proxy shall ask them again soon
            "allow_account_management = true\nerror_suppression_interval = 1\n"
            f"[filter:tempauth]\nuse = egg:swift#tempauth\nuser_{ACCOUNT}_{ACCOUNT} = {SECRET_KEY} .admin\n"
            f"{sections}"
        )


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def has_extended_attributes(folder: Path) -> bool:
    """Return whether files in ``folder`` support extended attributes, in which Swift keeps metadata."""
    file = folder / "attributes"
    file.touch()
    try:
        os.setxattr(file, "user.test", b"1")
    except OSError:
        return False
    return True
