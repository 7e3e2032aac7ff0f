"""A real S3 service for tests: Ceph's gateway over one monitor and one disk, in a folder."""

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path

from tests.support.servers.ports import free_port
from tests.support.servers.s3_server import ACCESS_KEY, HOST, SECRET_KEY, wait_until_open

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw")
PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
DISK_BYTES = 4 << 30
_CONFIG = """\
[global]
fsid = {fsid}
mon_host = {monitor}
mon_initial_members = a
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
public_network = 127.0.0.0/8
ms_bind_ipv6 = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
log_file = {folder}/log/$name.log
mon_data_avail_crit = 1
mon_data_avail_warn = 2
osd_memory_target = 939524096
[mon.a]
mon_data = {folder}/mon
host = localhost
[osd.0]
osd_data = {folder}/osd
osd_objectstore = bluestore
bluestore_block_size = {disk_bytes}
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_data = {folder}/rgw
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 5
"""


def missing_programs() -> list[str]:
    """Return the programs of a CephServer that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class CephServer:
    """The three daemons; `kill_gateway` and `start_gateway` are what tests do to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen] = []
        self._gateway: subprocess.Popen | None = None
        self._port, self._fsid = free_port(), str(uuid.uuid4())
        self._env = os.environ | {"CEPH_CONF": str(folder / "ceph.conf")}
        self.endpoint = f"http://{HOST}:{self._port}"

    def start(self) -> None:
        for name in ("run", "log", "mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        monitor = f"[v2:{HOST}:{free_port()},v1:{HOST}:{free_port()}]"
        (self._folder / "ceph.conf").write_text(
            _CONFIG.format(
                fsid=self._fsid, monitor=monitor, folder=self._folder,
                disk_bytes=DISK_BYTES, port=self._port,
            )
        )  # fmt: skip
        # daemons in the order in which each needs the one before
        self._make_keys()
        self._start_monitor(monitor)
        self._start_disk()
        self.start_gateway()
        self._run(
            "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}",
        )  # fmt: skip

    def start_gateway(self) -> None:
        self._gateway = self._spawn("radosgw", "-n", "client.rgw")
        wait_until_open(self._port, timeout_s=200)

    def kill_gateway(self) -> None:
        self._gateway.kill()
        self._gateway.wait(100)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(100)

    def _make_keys(self) -> None:
        keyring = str(self._folder / "keyring")
        self._run(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.",
            "--cap", "mon", "allow *",
        )  # fmt: skip
        for name in ("client.admin", "client.rgw", "osd.0"):
            caps = [word for to in ("mon", "osd", "mgr") for word in ("--cap", to, "allow *")]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)

    def _start_monitor(self, monitor: str) -> None:
        keyring, monmap = str(self._folder / "keyring"), str(self._folder / "monmap")
        self._run(
            "monmaptool", "--clobber", "--create", "--addv", "a", monitor, "--fsid", self._fsid,
            monmap,
        )  # fmt: skip
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-i", "a")

    def _start_disk(self) -> None:
        disk = str(uuid.uuid4())
        self._run("ceph", "osd", "new", disk, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._spawn("ceph-osd", "-i", "0")
        # without a place in the map no data would come to the disk
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
        deadline_s = time.monotonic() + 200
        while "1 up" not in self._run("ceph", "osd", "stat"):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the disk daemon did not come up; see its log")
            time.sleep(0.2)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
        return done.stdout

    def _spawn(self, *command: str) -> subprocess.Popen:
        log = (self._folder / "log" / "output").open("a")
        with log:
            daemon = subprocess.Popen([*command, "-f"], env=self._env, stdout=log, stderr=log)
        self._daemons.append(daemon)
        return daemon
