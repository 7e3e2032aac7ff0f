"""Machines made of Linux namespaces: each has its own address, processes, home folder and sshd.

Every machine is a clone of one image, a home folder into which `cluster/setup-node.sh` has installed
raymega once. Needs root; whoever logs in is the ordinary user `ubuntu`, known to these machines only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path("/var/cache/raymega-rehearsal")
WORK = Path("/var/tmp/raymega-rehearsal")
PREFIX, BRIDGE, GATEWAY = "raymega-", "raymega0", "10.77.0.1"
USER, UID = "ubuntu", 1000
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "rsync", "ssh-keygen", "sshd")
EXCLUDED = (".git", ".venv", "runs", "demo-out", "mlruns", "__pycache__", ".mypy_cache")

# What a freshly installed Ubuntu has: its own name resolves to loopback, the user cannot sudo here.
_FILES = {
    "passwd": f"root:x:0:0::/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
    f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n",
    "group": f"root:x:0:\nnogroup:x:65534:\n{USER}:x:{UID}:\n",
    "shadow": f"root:*:19000:0:99999:7:::\n{USER}:*:19000:0:99999:7:::\n",
    "hosts": "127.0.0.1 localhost\n127.0.1.1 {name}\n",
}
# These machines share this one's cores with whatever else it does.
_PROFILE = "export RAY_worker_niceness=0\n"
_ROOT = """
for file in passwd group shadow hosts; do mount --bind $ROOT/$file /etc/$file; done
mount -t tmpfs tmpfs /home; mkdir /home/ubuntu
mount -t tmpfs tmpfs /mnt; mkdir /mnt/store; mount --bind $STORE /mnt/store
"""
_BOOT = f"""
hostname $NAME
ulimit -Hn 1048576 || true; ulimit -Sn 1024
{_ROOT}
mount -t overlay overlay -o lowerdir=$IMAGE,upperdir=$ROOT/upper,workdir=$ROOT/work /home/ubuntu
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=16g tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir /run/sshd
$SSHD -D -e -f /dev/null -h $ROOT/host_key -o UsePAM=no -o PasswordAuthentication=no
"""
_INSTALL = f"""
{_ROOT}
mount --bind $IMAGE /home/ubuntu
cd /home/ubuntu
setpriv --reuid={UID} --regid={UID} --clear-groups bash raymega/cluster/setup-node.sh
"""


def missing() -> str:
    """Return why no machine can be created here; '' when they can."""
    # say the first thing that is missing, with what installs it
    if os.geteuid() != 0:
        return "namespaces with an sshd each need root"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if absent:
        return f"no {', '.join(absent)}; apt-get install openssh-server rsync iproute2 util-linux"
    version = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info[1])"],
                             capture_output=True, text=True, check=False)  # fmt: skip
    if version.returncode or int(version.stdout) < 11:
        return "no /usr/bin/python3 of 3.11 or newer"
    return ""


@dataclass
class Host:
    """A machine; ``process`` holds its process namespace together and ends all of it."""

    name: str
    address: str
    folder: Path
    process: subprocess.Popen | None = None

    @property
    def network(self) -> str:
        """The name of its network namespace."""
        return f"{PREFIX}{self.name}"

    @property
    def cable(self) -> str:
        """The bridge's end of its cable."""
        return f"rm-{self.name}"

    @property
    def log(self) -> Path:
        """Return the path of the log of the machine's sshd."""
        return self.folder / "console.log"

    def boot(self, image: Path) -> None:
        """Start it, up to its sshd. A machine that has crashed comes back with its disk."""
        # the disk: an overlay over the image, kept when the machine crashes
        for folder in ("upper", "work"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        os.chown(self.folder / "upper", UID, UID)
        (self.folder / "upper/.profile").write_text(_PROFILE)
        for file, text in _FILES.items():
            (self.folder / file).write_text(text.format(name=self.name))
        (self.folder / "shadow").chmod(0o600)
        # a machine keeps its host key, or clients would refuse it after a crash
        if not (self.folder / "host_key").exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "host_key")
        env = {"PATH": _path(), "NAME": self.name, "ROOT": str(self.folder), "IMAGE": str(image),
               "STORE": str(WORK / "store"), "SSHD": shutil.which("sshd", path=_path())}  # fmt: skip
        namespaces = (
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--mount-proc",
            "--uts",
            "--ipc",
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                # killing the first process of the namespace ends all of the machine
                ["ip", "netns", "exec", self.network, "unshare", *namespaces, "bash", "-ceu", _BOOT],
                env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._wait_for_sshd()

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            if "Server listening" in self.log.read_text():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not boot: {self.log.read_text()}")

    def crash(self) -> None:
        """End every process of the machine at once; peers get resets."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        """Crash it and take its network away: another machine may be given its addresses."""
        self.crash()
        _end_processes(self.network)
        _run("ip", "link", "del", self.cable)
        _run("ip", "netns", "del", self.network)

    def cut_link(self) -> None:
        """Cut the link of the machine, which keeps running."""
        _run("ip", "link", "set", self.cable, "down")

    def mend_link(self) -> None:
        """Plug the cable in again."""
        _run("ip", "link", "set", self.cable, "up")

    def command(self, text: str) -> list[str]:
        """Arguments that run ``text`` on the machine, in a login shell of its user."""
        return [
            "nsenter", "--target", str(self._init()), "--mount", "--net", "--pid", "--uts", "--ipc",
            "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--reset-env",
            "bash", "--login", "-c", f"cd && {text}",
        ]  # fmt: skip

    def send_repository(self, image: Path) -> None:
        """Bring the working tree to the machine's ~/raymega."""
        ssh = f"ssh -i {image}/.ssh/id_ed25519 -o StrictHostKeyChecking=no -o LogLevel=ERROR"
        ssh += " -o UserKnownHostsFile=/dev/null"
        copy_repository(f"{USER}@{self.address}:raymega/", "-e", ssh)

    def run(self, text: str, *, timeout_s: float = 120.0, is_checked: bool = True) -> str:
        """Run ``text`` to its end and return what it printed."""
        done = subprocess.run(self.command(text), capture_output=True, text=True,
                              timeout=timeout_s, check=False)  # fmt: skip
        if is_checked and done.returncode:
            raise RuntimeError(
                f"{self.name}: {text}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def processes(self, pattern: str) -> list[str]:
        """Command lines of its processes that ``pattern`` is found in; none while it is off."""
        if not self._children():
            return []
        # the kernel shows all processes outside: keep those of this machine's namespace
        mine = Path(f"/proc/{self._init()}/ns/pid").readlink()
        lines = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (process / "ns/pid").readlink() == mine:
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    lines += [line] if re.search(pattern, line) else []
        return lines

    def _init(self) -> int:
        """The machine's first process, by its number outside."""
        return int(self._children()[0])

    def _children(self) -> list[str]:
        if not self.process:
            return []
        pid = self.process.pid
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return []


class Site:
    """A network of machines on one bridge, with one shared folder at /mnt/store of each."""

    def __init__(self) -> None:
        """Clear what an earlier site left, and put up an empty network."""
        self.hosts: list[Host] = []
        self.image = make_image()
        _clear()
        (WORK / "store").mkdir(parents=True)
        # the machines' user writes there, not root
        os.chown(WORK / "store", UID, UID)
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")

    def add_route(self, network: str) -> None:
        """Machines have addresses of this network, too."""
        _run("ip", "route", "add", network, "dev", BRIDGE)

    def add_host(self, name: str, *addresses: str) -> Host:
        """A running machine; whoever holds the site's key may log in."""
        host = Host(name, addresses[0], WORK / name)
        _run("ip", "netns", "add", host.network)
        _run("ip", "link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.network)
        _run("ip", "link", "set", host.cable, "master", BRIDGE, "up")
        adds = [f"addr add {address}/32 dev eth0" for address in addresses]
        for words in (*adds, "link set lo up", "link set eth0 up",
                      f"route add default dev eth0 src {host.address}"):  # fmt: skip
            _run("ip", "-n", host.network, *words.split())
        self.hosts.append(host)
        host.boot(self.image)
        return host

    def close(self) -> None:
        """End every machine and take the network down."""
        for host in self.hosts:
            host.crash()
        _clear()


def make_image() -> Path:
    """A home folder with raymega installed, made by the shipped set-up script; kept for next time."""
    texts = [(REPOSITORY / "pyproject.toml").read_text().split("\n[tool.")[0]]
    texts += [
        (REPOSITORY / name).read_text() for name in ("constraints.txt", "cluster/setup-node.sh")
    ]
    image = CACHE / hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
    if not (image / "installed").exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        started = time.monotonic()
        _install(image)
        (image / "installed").write_text(f"{time.monotonic() - started:.0f} s\n")
    return image


def _install(image: Path) -> None:
    root = CACHE / "root"
    for folder in (
        root,
        image / ".ssh",
        image / ".ray",
        image / ".config" / "pip",
        CACHE / "store",
    ):
        folder.mkdir(parents=True)
    for file, text in _FILES.items():
        (root / file).write_text(text.format(name="image"))
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", image / ".ssh/id_ed25519")
    shutil.copy(image / ".ssh/id_ed25519.pub", image / ".ssh/authorized_keys")
    settings = Path.home() / ".config/pip/pip.conf"
    if settings.exists():
        shutil.copy(settings, image / ".config/pip/pip.conf")
    copy_repository(image / "raymega")
    (image / ".ssh").chmod(0o700)
    _run("chown", "-R", f"{UID}:{UID}", image)
    env = os.environ | {"HOME": f"/home/{USER}", "ROOT": str(root), "IMAGE": str(image),
                        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                        "STORE": str(CACHE / "store"), "PIP_NO_CACHE_DIR": "1"}  # fmt: skip
    env = {key: value for key, value in env.items() if not key.startswith(("PYTHON", "VIRTUAL"))}
    subprocess.run(["unshare", "--mount", "bash", "-ceu", _INSTALL], env=env, check=True)


def copy_repository(target: str | Path, *options: str) -> None:
    """The working tree as it is, without what `ray up` would not send either."""
    excluded = [f"--exclude={name}" for name in EXCLUDED]
    _run("rsync", "-a", "--delete", *options, *excluded, f"{REPOSITORY}/", target)


def _clear() -> None:
    """Take away the network, its namespaces and the disks, whoever left them."""
    shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
    for name in re.findall(rf"^{PREFIX}\S+", shown, re.MULTILINE):
        _end_processes(name)
        _run("ip", "netns", "del", name)
    shown = subprocess.run(
        ["ip", "-br", "link"], capture_output=True, text=True, check=False
    ).stdout
    for name in re.findall(rf"^(rm-\w+|{BRIDGE})\b", shown, re.MULTILINE):
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(WORK)


def _end_processes(name: str) -> None:
    """Kill a network namespace's processes until none is left; their sockets close with them."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        if not found.stdout.split():
            return
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError(f"processes of {name} do not end")


def _path() -> str:
    return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _run(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, words))}: {done.stderr.strip()}")
