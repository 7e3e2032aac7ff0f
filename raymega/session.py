"""Connection of this process to Ray, with every default that matters made explicit.

The module decides address, authentication mode and log output. Ray is imported inside the functions,
because it reads part of its environment at import.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymega import ray_private
from raymega.errors import ConfigError, Fault, RaymegaError

PROBE_TIMEOUT_S = 5.0
LAST_PORT = 65_535
PRIVATE_TOKEN_PREFIX = "raymega-private-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Open connection to a cluster.

    Attributes:
        address: Address of the cluster's head, ``host:port``.
        node_id: Ray's id of this process's node.
        is_private: Whether this process started the cluster, which ends with it.
    """

    address: str
    node_id: str
    is_private: bool


def open_session(
    address: str,
    *,
    num_cpus: int = 0,
    include_dashboard: bool = False,
    log_to_driver: bool = False,
    is_joining: bool = False,
    py_executable: Callable[[], str] | None = None,
) -> Session:
    """Connect this process to a cluster, or start one inside it.

    Ray replaces the SIGTERM handler here: install your own afterwards. An existing RAY_AUTH_MODE is
    kept. Otherwise a private instance, whose ports listen on every interface, gets the user's token or
    else a new one, which is never on disk. A cluster is joined with the user's token, if there is one.

    Args:
        address: ``local`` starts a private instance; ``HOST:PORT`` joins that cluster; ``auto``
            joins the one that RAY_ADDRESS names or that ``ray start`` left running on this
            machine, and is ``local`` when there is none.
        num_cpus: Number of CPUs that a private instance offers; 0 is the machine's.
        include_dashboard: Whether to start a private instance's dashboard.
        log_to_driver: Whether to print the output of all workers here.
        is_joining: Whether the cluster must exist; nothing is started then.
        py_executable: Function that returns the command in place of ``python`` for all workers of a
            private instance; None leaves it to Ray.

    Raises:
        ConfigError: No cluster answers at the address, or it refuses the token.
    """
    # resolve the address, and set the environment before Ray is imported
    target = _resolve(address)
    is_private = target == "local"
    if is_private and is_joining:
        raise ConfigError(_nothing_to_join(address))
    set_environment(is_private=is_private)
    worker_command = py_executable() if py_executable and is_private else ""
    import ray

    try:
        # connect, or start Ray
        with ray_private.own_processes(py_executable=worker_command):
            ray.init(
                target,
                num_cpus=num_cpus if is_private and num_cpus else None,
                include_dashboard=include_dashboard,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(_refusal(target, error)) from error
    except Exception as error:  # Ray raises bare ones when its processes do not come up in time
        raise RaymegaError(_no_start(target, error)) from error
    if not log_to_driver:
        ray_private.print_no_worker_logs()
    here = ray.get_runtime_context()
    return Session(address=here.gcs_address, node_id=here.get_node_id(), is_private=is_private)


def close_session() -> None:
    """Leave the cluster; a private instance ends with it. Closing twice is harmless."""
    import ray

    ray.shutdown()
    # A private instance's token would lock this process out of the next cluster.
    if os.environ.get("RAY_AUTH_TOKEN", "").startswith(PRIVATE_TOKEN_PREFIX):
        del os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]
        ray_private.reread_environment()


@contextmanager
def session_at(address: str) -> Iterator[None]:
    """Open a session for the body; an existing one of this process is used and left open."""
    import ray

    if ray.is_initialized():
        yield
        return
    open_session(address)
    try:
        yield
    finally:
        close_session()


def set_environment(*, is_private: bool) -> None:
    """Set the environment variables that Ray reads, for this process and its children.

    ``open_session`` and clients of the job server call it before they contact a cluster.

    Args:
        is_private: Whether a private instance follows, which gets a new token if the user has none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Lines of different ranks are equal up to numbers, and Ray would merge them for 5 s. Read at
    # ray's import: a process that imported it earlier keeps Ray's default.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Trainers of cluster.host=ray_train are then in the dashboard's Train tab; it concerns no others.
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    if os.environ.get("RAY_AUTH_MODE"):
        return
    if is_private and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = PRIVATE_TOKEN_PREFIX + secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token" if _has_token() else "disabled"
    ray_private.reread_environment()


def _resolve(address: str) -> str:
    """Return ``local``, or the ``host:port`` of a cluster that answers."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _recorded_address() or "local"
    if address == "local":
        return address
    fault = _address_fault(address)
    if fault is not None:
        raise ConfigError(fault)
    return address


def _recorded_address() -> str:
    """Return the cluster that ``ray start`` recorded on this machine, or '' when none is alive.

    Ray's own ``auto`` also joins private instances of other processes, which end without notice.
    """
    recorded = ray_private.recorded_address()
    return recorded if recorded and not _probe(recorded) else ""


def _address_fault(address: str) -> Fault | None:
    # Ray Client and job-server addresses
    if "://" in address:
        return Fault(
            fact=f"address={address!r}",
            rule="raymega's driver must be a full member of the cluster, not a remote client",
            remedy="give HOST:PORT of the head (its port is 6379 by default), or run it on the cluster: "
            "raymega submit JOB.yaml --address http://HOST:8265",
        )
    cause = _probe(address)
    if not cause:
        return None
    return Fault(
        fact=f"address={address!r} does not answer ({cause})",
        rule=f"it must be auto, local, or HOST:PORT of a Ray head within {PROBE_TIMEOUT_S:g} s",
        remedy="start a head with `ray start --head`, or use local",
    )


def _nothing_to_join(address: str) -> Fault:
    return Fault(
        fact=f"address={address!r} leads to no cluster",
        rule="the run's own cluster must be joined; a private Ray of another process cannot be",
        remedy="give HOST:PORT of the head; a run is also reached by its folder, without an address",
    )


def _probe(address: str) -> str:
    """Return why no Ray head can be reached at ``host:port``; '' when one answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not of the form HOST:PORT"
    if not 0 < int(port) <= LAST_PORT:  # a socket would take it modulo 65,536
        return f"the port must be 1 to {LAST_PORT}"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as connection:
            # a head with TLS says nothing before a handshake
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return ""
            return (
                "" if _speaks_http2(connection) else "another server listens there, not a Ray head"
            )
    except OSError as error:
        return str(error)


def _speaks_http2(connection: socket.socket) -> bool:
    """Return whether the peer answers as gRPC does; Ray itself would try again for many minutes.

    It sends a client's preface and empty settings, and reads the header of the first frame (RFC 9113,
    sections 3.4 and 4.1), which must be of the type SETTINGS.
    """
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    try:
        header = connection.recv(9, socket.MSG_WAITALL)
    except ConnectionResetError:
        return False
    return len(header) == 9 and header[3] == 4


def _refusal(target: str, error: Exception) -> Fault:
    return Fault(
        fact=f"Ray at {target!r} refused the connection ({str(error).splitlines()[0]})",
        rule="the cluster's token and this process's must agree",
        remedy="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH), or "
        "RAY_AUTH_MODE=disabled for a cluster without tokens",
    )


def _no_start(target: str, error: Exception) -> Fault:
    return Fault(
        fact=f"Ray at {target!r} did not start ({str(error).strip().splitlines()[0]})",
        rule="its processes must come up before a run can begin; the load is "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs",
        remedy="try again when the machine is less busy, or once `ray start --head` has succeeded; "
        f"Ray's own logs are in {_ray_logs()}",
    )


def _ray_logs() -> Path:
    """Return the folder of logs of the Ray that was started last on this machine."""
    newest = Path(tempfile.gettempdir(), "ray", "session_latest")
    return newest.resolve() / "logs" if newest.exists() else newest.parent


def _has_token() -> bool:
    """Return whether a token is in one of the three places where Ray looks for it."""
    saved = Path.home() / ".ray" / "auth_token"
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or saved.is_file()
