"""One Ceph for all tests of the folder, where its Debian packages are installed, and one Swift."""

import pytest

from tests.support.servers import swift_server
from tests.support.servers.ceph_server import PACKAGES, CephServer, missing_programs
from tests.support.servers.s3_server import BUCKET, environment, exported, raw_client
from tests.support.servers.store_outage import Outage


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed; apt-get install {PACKAGES}")
    server = CephServer(tmp_path_factory.mktemp("ceph"))
    try:
        server.start()
        with exported(environment(server.endpoint)):
            raw_client(server.endpoint).create_bucket(Bucket=BUCKET)
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def swift(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    if not swift_server.has_extended_attributes(folder):
        pytest.skip("files of the temporary folder cannot have extended attributes")
    server = swift_server.SwiftServer(folder)
    try:
        server.start()
        with exported(environment(server.endpoint, *server.keys)):
            raw_client(server.endpoint, *server.keys).create_bucket(Bucket=BUCKET)
            yield server
    finally:
        server.stop()


@pytest.fixture
def outage(monkeypatch):
    """One death of a server, which clients of this process meet."""
    outage = Outage(monkeypatch)
    yield outage
    outage.check()


@pytest.fixture
def report_rates(capsys):
    """Prints figures past the capture: they are for people, no test depends on them."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}")

    return show
