"""The preflight check of every node that hosts workers: versions, the run's store, the data.

In one round the driver writes an object, each node reads it and writes one of its own, and the driver reads
those. This module has the questions and the verdict; ``workers/ray_worker_group.py`` makes the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4

from raymega.config.data import is_computed
from raymega.data.checks import dataset_identity
from raymega.data.format import META_FILE, local_folder, read_meta, size_faults
from raymega.data.megatron import is_megatron
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, Fault, RaymegaError, counted, one_line, raise_faults
from raymega.events import NodesChecked
from raymega.orchestrate.cluster.node_probes import local_versions, version_fault
from raymega.plugins import registry_of
from raymega.storage.registry import local_path, open_store
from raymega.storage.retry import RetryingStore, RetryPolicy
from raymega.storage.store import Store

FOLDER = "preflight"
NUM_READERS = 16
READ_TIMEOUT_S = 60.0
"""Longest wait of the driver for what nodes wrote: twice as long as its store tries a request again, in seconds."""
RETRY_ONCE = RetryPolicy(pauses_s=(1.0,))
"""Tries of a node, and to read the data: a fault that passes must not refuse a node that joins a run at work."""
MAX_CAUSE_LENGTH = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightCheck:
    """The check that a node is to make (driver to worker).

    Attributes:
        store_uri: URI of the run's folder; empty when the store is not checked.
        folder: Key prefix of this round's objects, relative to the run's folder.
        data: Identity of each dataset that the driver reads, by path; empty when none is checked.
        modules: Modules of the job's plug-ins, one of which may have the store.
    """

    store_uri: str
    folder: str
    data: Mapping[str, str]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightResult:
    """The result of a node (worker to driver); empty texts mean success.

    Attributes:
        versions: Versions on the node, of node_probes.local_versions.
        sees_driver: Reason why it cannot read the driver's object; empty if it can.
        writes: Reason why it cannot write its own object; empty if it can.
        sees_data: Dataset of the driver that it cannot read, and why; empty if it can read all.
    """

    versions: Mapping[str, str]
    sees_driver: str = ""
    writes: str = ""
    sees_data: str = ""


def answer_question(check: PreflightCheck, node_id: str) -> PreflightResult:
    """Make the check on the node on which it runs, and return the result."""
    # without the driver's object nothing is written, as that would create the folder on a local disk
    sees_driver = writes = ""
    registry_of(check.modules)
    if check.store_uri:
        store = RetryingStore(open_store(check.store_uri), retry=RETRY_ONCE)
        sees_driver = _cause_of(lambda: _find(store, _driver_key(check)))
        if not sees_driver:
            mine = _node_key(check, node_id)
            writes = _cause_of(lambda: store.put(mine, [b"node"], overwrite=True))
    return PreflightResult(
        versions=local_versions(),
        sees_driver=sees_driver,
        writes=writes,
        sees_data=next(filter(None, map(_data_fault, check.data.items())), ""),
    )


@dataclass(kw_only=True, slots=True)
class _Round:
    """A round of checks: the nodes (address by id), the check, and the results so far by node id."""

    nodes: Mapping[str, str]
    check: PreflightCheck
    begun_s: float
    results: dict[str, PreflightResult] = field(default_factory=dict)


class Preflight:
    """The driver's side: checks each node once in the driver's life, and judges the results."""

    def __init__(
        self,
        *,
        store: Store,
        data_paths: Sequence[str],
        driver_node: str,
        modules: tuple[str, ...] = (),
    ) -> None:
        """Prepare the checks; nothing is accessed yet.

        Args:
            store: Store of the run's folder.
            data_paths: Paths of the job's datasets.
            driver_node: Ray's id of the driver's node.
            modules: Modules of the job's plug-ins.
        """
        self._modules = modules
        self._store, self._data_paths, self._driver_node = store, data_paths, driver_node
        self._sound: set[str] = set()  # ids of nodes that passed
        self._round: _Round | None = None

    @property
    def is_open(self) -> bool:
        """True while a node's result is pending."""
        return self._round is not None

    def begin(self, nodes: Mapping[str, str]) -> tuple[PreflightCheck, list[str]]:
        """Begin a round for the new ones of ``nodes`` (address by id); return the check and their ids.

        Raises:
            StorageError: The driver cannot write its object.
        """
        begun_s = time.monotonic()
        new = {node: address for node, address in nodes.items() if node not in self._sound}
        check = self._make_check(is_elsewhere=any(node != self._driver_node for node in new))
        self._round = _Round(nodes=new, check=check, begun_s=begun_s) if new else None
        if new and check.store_uri:
            self._store.put(_driver_key(check), [b"driver"], overwrite=True)
        return check, list(new)

    def add(self, node: str, result: PreflightResult) -> list[NodesChecked]:
        """Add one result; the last one ends the round, and its event is returned.

        Raises:
            ConfigError: Nodes failed the check; all faults are listed.
        """
        assert self._round, "only a node that was asked answers"
        asked = self._round
        asked.results[node] = result
        if len(asked.results) < len(asked.nodes):
            return []
        # last result: judge all of them
        raise_faults(ConfigError, self._faults(asked))
        self._sound.update(asked.nodes)
        self._round = None
        seconds = time.monotonic() - asked.begun_s
        return [NodesChecked(seconds=seconds, detail=_scope(asked.check, len(asked.nodes)))]

    def cancel(self) -> None:
        """Drop a pending round, whose attempt is over, and delete its objects."""
        if self._round is not None:
            self._tidy(self._round.check, list(self._round.nodes))
        self._round = None

    def _make_check(self, *, is_elsewhere: bool) -> PreflightCheck:
        """Return the check of a new round; ``is_elsewhere`` says that it has nodes other than the driver's."""
        # a local path on the driver's own node needs no check
        asks_store = is_elsewhere or local_path(self._store.uri) is None
        asked = [
            path
            for path in self._data_paths
            if not is_computed(path) and (is_elsewhere or is_remote(path))
        ]
        return PreflightCheck(
            store_uri=self._store.uri if asks_store else "",
            folder=f"{FOLDER}/{uuid4().hex[:12]}",
            data={path: _identity(path) for path in asked},
            modules=self._modules,
        )

    def _faults(self, asked: _Round) -> list[Fault]:
        """Return the faults of all nodes, and delete the round's objects."""
        own, check = local_versions(), asked.check
        # what each node said of itself
        faults = []
        for node, result in asked.results.items():
            other = version_fault(own, asked.nodes[node], result.versions)
            faults += [other] if other else []
            faults += _answer_faults(asked.nodes[node], check, result)
        # whether the driver sees what the nodes wrote
        if check.store_uri:
            results = asked.results.items()
            wrote = [node for node, its in results if not its.sees_driver and not its.writes]
            unseen = self._unseen(check, wrote)
            for node, why in unseen.items():
                wrote_to = f"what node {asked.nodes[node]} wrote to {check.store_uri} ({why})"
                faults.append(_not_shared(f"the driver does not see {wrote_to}"))
            self._tidy(check, wrote)
        return faults

    def _unseen(self, check: PreflightCheck, wrote: list[str]) -> dict[str, str]:
        """Return the nodes whose object the driver cannot read, with the reasons; reads concurrently."""
        pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="preflight")
        pending = {
            node: pool.submit(_cause_of, _find, self._store, _node_key(check, node))
            for node in wrote
        }
        done, _ = wait(pending.values(), timeout=READ_TIMEOUT_S)
        # a read that hangs must not hold up the driver
        pool.shutdown(wait=False, cancel_futures=True)
        late = f"no answer in {READ_TIMEOUT_S:g} s"
        causes = {node: look.result() if look in done else late for node, look in pending.items()}
        return {node: cause for node, cause in causes.items() if cause}

    def _tidy(self, check: PreflightCheck, wrote: list[str]) -> None:
        if not check.store_uri:
            return
        keys = [_driver_key(check), *(_node_key(check, node) for node in wrote)]
        with ThreadPoolExecutor(NUM_READERS) as pool, suppress(RaymegaError):
            list(pool.map(self._store.delete, keys))


def _scope(check: PreflightCheck, num_nodes: int) -> str:
    """Return one line for people that says what was checked and what was not."""
    nodes = counted(num_nodes, "node")
    stores = {"the run's store": check.store_uri, "the data": check.data}
    asked = [name for name, found in stores.items() if found]
    if asked:
        return f"versions and {' and '.join(asked)} are right on {nodes}"
    return f"versions are right on {nodes}; local paths on the driver's own node were not probed"


def _cause_of(look: Callable[..., None], *args: object) -> str:
    """Return why ``look(*args)`` fails, in one line; empty when it succeeds."""
    try:
        look(*args)
    except RaymegaError as error:
        cause = error.faults[0].fact
    except OSError as error:
        cause = str(error)
    else:
        return ""
    return one_line(cause, MAX_CAUSE_LENGTH)


def _find(store: Store, key: str) -> None:
    try:
        store.get(key)
    except KeyError:
        raise FileNotFoundError("it is not there") from None


def _data_fault(dataset: tuple[str, str]) -> str:
    """Return the path of a dataset and why it cannot be read here; empty if it can."""
    cause = _cause_of(_look_at_data, *dataset)
    return f"{dataset[0]!r} ({cause})" if cause else ""


def _look_at_data(path: str, identity: str) -> None:
    """Raise if the dataset differs from the driver's; file sizes are checked in a folder only.

    The shards of an object store are checked when they are fetched.
    """
    found = _identity(path)
    if found != identity:
        raise OSError(f"{path}/{META_FILE} describes dataset {found}, not {identity}")
    if not is_remote(path) and not is_megatron(path):
        raise_faults(RaymegaError, size_faults(local_folder(path), read_meta(local_folder(path))))


def _identity(path: str) -> str:
    return RETRY_ONCE.read(lambda: dataset_identity(path))


def _answer_faults(name: str, check: PreflightCheck, result: PreflightResult) -> Iterator[Fault]:
    if result.sees_driver:
        yield _not_shared(
            f"node {name} does not see what the driver wrote to {check.store_uri} "
            f"({result.sees_driver})"
        )
    if result.writes:
        yield Fault(
            fact=f"node {name} cannot write to {check.store_uri} ({result.writes})",
            rule="every node that hosts workers writes its part of a checkpoint there",
            remedy="correct the permissions of the node's user or role, or free space",
        )
    if result.sees_data:
        yield Fault(
            fact=f"node {name} does not see the dataset {result.sees_data}",
            rule="every node that hosts workers reads the dataset that the driver reads",
            remedy="put the dataset on an object store or a file system that all nodes share, or "
            "copy it to the same path on each node",
        )


def _not_shared(fact: str) -> Fault:
    return Fault(
        fact=fact,
        rule="driver and nodes must share the run's store, or checkpoints and records are torn",
        remedy="set checkpoint.uri to an object store (s3://...) or to a file system that is mounted "
        "at the same path on every node",
    )


def _driver_key(check: PreflightCheck) -> str:
    return f"{check.folder}/driver"


def _node_key(check: PreflightCheck, node_id: str) -> str:
    return f"{check.folder}/{node_id}"
