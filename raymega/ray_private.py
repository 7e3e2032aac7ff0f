"""Access to Ray's private modules; no other file imports them.

It is tested with ray 2.55 to 2.60, the bounds in pyproject.toml. Each function names the condition under
which it can be removed. Ray is imported inside functions, because it reads part of its environment then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

START_TIMEOUT_S, ASKED_AGAIN_S = 180.0, 0.1


def recorded_address() -> str:
    """Return the ``host:port`` that ``ray start`` recorded on this machine, or ''.

    Goes when ``ray.init("auto")`` no longer joins private instances of other processes.
    """
    from ray._private.services import find_bootstrap_address

    return find_bootstrap_address(None) or ""


@contextmanager
def own_processes(*, py_executable: str = "") -> Iterator[None]:
    """Let Ray's processes that start in the body lead process groups of their own, and wait for them longer.

    A signal to our group (a scheduler's, a `timeout`'s) then reaches this process alone, which saves
    before it ends them. They still die when this process does. Ray gives up on a raylet after 30 s, which
    are too few on a machine of ten times its load. Goes when Ray has settings for both.

    Args:
        py_executable: Command that a raylet runs in place of ``python`` for a worker; '' for ``python``. An
            actor's runtime_env has the same setting, under which Ray imports itself once more for each worker.
    """
    from ray._private import services

    module = vars(services)
    # the class by which Ray starts its own processes, and the question whether a raylet is there
    start, get_node = module["ConsolePopen"], module["get_node"]
    started = list[Any]()

    def start_own(command: list[str], *args: Any, **kwargs: Any) -> Any:
        words = [_forking(word, py_executable) for word in command] if py_executable else command
        process = start(words, *args, process_group=0, **kwargs)
        started.append(process)
        return process

    def get_node_in_time(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                is_dead = any(process.poll() is not None for process in started)
                if not started or is_dead or time.monotonic() >= deadline:
                    raise
            time.sleep(ASKED_AGAIN_S)

    module["ConsolePopen"], module["get_node"] = start_own, get_node_in_time
    try:
        yield
    finally:
        module["ConsolePopen"], module["get_node"] = start, get_node


def _forking(word: str, py_executable: str) -> str:
    """Return a word of a raylet's command line, changed to start workers by ``py_executable``."""
    option, _, value = word.partition("=")
    if option == "--python_worker_command":
        return f"{option}={value.replace(sys.executable, py_executable, 1)}"
    # Ray loads idle workers ahead, of no job yet; one that is forked needs no head start
    return f"{option}=0" if option == "--num_prestart_python_workers" else word


def print_no_worker_logs() -> None:
    """Keep raylets' messages (a paragraph for each dead worker) off the driver's stdout.

    The driver reports a death itself, once, with the rank. Goes when Ray has a setting for it.
    """
    import ray._private.worker as core

    core._worker_logs_enabled = False


def reread_environment() -> None:
    """Make Ray's core read the authentication mode and token again.

    The core reads the mode when it is imported, and caches the token. Goes when ``ray.init`` takes both.
    """
    import ray._raylet as core  # its stubs lack these two

    core.Config.initialize("")  # type: ignore[attr-defined]
    core.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def gcs_client(address: str) -> Any:  # Ray's own, without stubs
    """Return a client of the head at ``host:port``, which can drain a node.

    Goes when Ray's public API drains nodes.
    """
    import ray._raylet as core

    return core.GcsClient(address=address)  # type: ignore[attr-defined]


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each living node, by node id and resource.

    Goes when ``ray.available_resources`` tells nodes apart.
    """
    from ray._private.state import state

    return state.available_resources_per_node()


def declared_resources() -> Mapping[str, float]:
    """Return the most that the autoscaler may provide, by resource; empty if it is unknown.

    Goes when a public call tells which node types a cluster can have.
    """
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() or {}


def drain_deadlines_ms() -> Mapping[str, int]:
    """Return when each draining node is taken away, ms since the epoch by node id; 0 without a deadline.

    Goes when ``ray.nodes`` tells it.

    Raises:
        AttributeError: This Ray has no such table.
        RuntimeError: The head does not answer.
    """
    from ray._private.state import state

    return state.get_draining_nodes()


def load_worker_program() -> None:
    """Import the program of Ray's workers without running it, and all that it imports.

    Ray's core reads part of its environment now. Goes when Ray forks workers from a loaded process.
    """
    import_module("ray._private.workers.default_worker")


def walk_shipped_files(root: Path, visit: Callable[[Path], None]) -> None:
    """Call ``visit`` with each path below ``root`` that a job's working folder would ship.

    Goes when Ray tells a working folder's size before it uploads it.
    """
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    # the same excludes as an upload: .gitignore and Ray's defaults
    excludes = [_get_excludes(root, get_runtime_env_default_excludes())]
    _dir_travel(root, excludes, visit, include_gitignore=True)
