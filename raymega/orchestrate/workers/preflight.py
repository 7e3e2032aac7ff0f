"""What every node that hosts workers is asked before they train: versions, the run's store, the data.

One round: the driver writes an object, each node looks for it and writes one of its own, the driver
looks for those. It owns the questions and the judgement; who carries them is worker_group's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4

from raymega.data.checks import dataset_identity
from raymega.data.format import META_FILE, local_folder, read_meta, size_faults
from raymega.data.remote_dataset import is_remote
from raymega.data.synthetic import SYNTHETIC_PATH
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.events import NodesChecked
from raymega.orchestrate.cluster.node_probes import local_versions, version_fault
from raymega.storage.registry import local_path, open_store
from raymega.storage.store import Store

FOLDER = "preflight"
NUM_READERS = 16
READ_TIMEOUT_S = 30.0
MAX_CAUSE_LENGTH = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightCheck:
    """What a node is asked (driver to worker).

    Attributes:
        store_uri: The run's folder; empty when the store is not asked about.
        folder: Where the objects of this round lie, below the run's folder.
        data_path: The dataset; empty when it is not asked about.
        data_identity: What the driver sees there.
    """

    store_uri: str
    folder: str
    data_path: str
    data_identity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightResult:
    """What a node says (worker to driver); an empty text is a yes.

    Attributes:
        versions: As of node_probes.local_versions.
        sees_driver: It reads what the driver wrote, or why not.
        writes: It has written its own object, or why not.
        sees_data: It reads the dataset that the driver reads, or why not.
    """

    versions: Mapping[str, str]
    sees_driver: str = ""
    writes: str = ""
    sees_data: str = ""


def answer_question(check: PreflightCheck, node_id: str) -> PreflightResult:
    """Runs on the node. Where the driver's object is missing it writes nothing: no folder is made."""
    sees_driver = writes = ""
    if check.store_uri:
        store = open_store(check.store_uri)
        sees_driver = _cause_of(lambda: _find(store, _driver_key(check)))
        if not sees_driver:
            mine = _node_key(check, node_id)
            writes = _cause_of(lambda: store.put(mine, [b"node"], overwrite=True))
    return PreflightResult(
        versions=local_versions(),
        sees_driver=sees_driver,
        writes=writes,
        sees_data=_cause_of(lambda: _look_at_data(check)) if check.data_path else "",
    )


@dataclass(kw_only=True, slots=True)
class _Round:
    """One round: which nodes (address by id) are asked what, and who has answered."""

    nodes: Mapping[str, str]
    check: PreflightCheck
    begun_s: float
    results: dict[str, PreflightResult] = field(default_factory=dict)


class Preflight:
    """The driver's end: asks each node once in the driver's life, and judges the answers."""

    def __init__(self, *, store: Store, data_path: str, driver_node: str) -> None:
        """Asks nothing yet.

        Args:
            store: The run's folder.
            data_path: The job's ``data.path``.
            driver_node: Ray's id of the node that the driver is on.
        """
        self._store, self._data_path, self._driver_node = store, data_path, driver_node
        self._sound: set[str] = set()
        self._round: _Round | None = None

    @property
    def is_open(self) -> bool:
        """Some node is still being asked."""
        return self._round is not None

    def begin(self, nodes: Mapping[str, str]) -> tuple[PreflightCheck, list[str]]:
        """Open a round for those of ``nodes`` (address by id) that are new: the question, and whom.

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
        """Take in one answer; the last one closes the round.

        Raises:
            ConfigError: With everything that is wrong with the nodes.
        """
        assert self._round, "only a node that was asked answers"
        asked = self._round
        asked.results[node] = result
        if len(asked.results) < len(asked.nodes):
            return []
        raise_faults(ConfigError, self._faults(asked))
        self._sound.update(asked.nodes)
        self._round = None
        seconds = time.monotonic() - asked.begun_s
        return [NodesChecked(seconds=seconds, detail=_scope(asked.check, len(asked.nodes)))]

    def cancel(self) -> None:
        """Forget a round that is open: its attempt is over."""
        if self._round is not None:
            self._tidy(self._round.check, list(self._round.nodes))
        self._round = None

    def _make_check(self, *, is_elsewhere: bool) -> PreflightCheck:
        """A local path on the driver's own node needs no question."""
        asks_store = is_elsewhere or local_path(self._store.uri) is None
        is_file = self._data_path != SYNTHETIC_PATH
        asks_data = is_file and (is_elsewhere or is_remote(self._data_path))
        return PreflightCheck(
            store_uri=self._store.uri if asks_store else "",
            folder=f"{FOLDER}/{uuid4().hex[:12]}",
            data_path=self._data_path if asks_data else "",
            data_identity=dataset_identity(self._data_path) if asks_data else "",
        )

    def _faults(self, asked: _Round) -> list[Fault]:
        """Everything that is wrong with the nodes; takes the round's objects away."""
        own, check = local_versions(), asked.check
        faults = []
        for node, result in asked.results.items():
            other = version_fault(own, asked.nodes[node], result.versions)
            faults += [other] if other else []
            faults += _answer_faults(asked.nodes[node], check, result)
        if check.store_uri:
            wrote = [node for node, result in asked.results.items() if _has_written(result)]
            unseen = self._unseen(check, wrote)
            faults += [_unseen_by_driver(asked.nodes[n], check, why) for n, why in unseen.items()]
            self._tidy(check, wrote)
        return faults

    def _unseen(self, check: PreflightCheck, wrote: list[str]) -> dict[str, str]:
        """By node whose object the driver does not find, why; all are looked for at once."""
        pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="preflight")
        pending = {
            node: pool.submit(_cause_of, _find, self._store, _node_key(check, node))
            for node in wrote
        }
        done, _ = wait(pending.values(), timeout=READ_TIMEOUT_S)
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
    """One line for people: what was checked, and what was not."""
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    stores = {"the run's store": check.store_uri, "the data": check.data_path}
    asked = [name for name, uri in stores.items() if uri]
    if asked:
        return f"versions and {' and '.join(asked)} are right on {nodes}"
    return f"versions are right on {nodes}; local paths on the driver's own node were not probed"


def _cause_of(look: Callable[..., None], *args: object) -> str:
    """Why ``look`` fails, in one line; empty when it does not."""
    try:
        look(*args)
    except RaymegaError as error:
        fault = error.faults[0]
        cause = fault.fact if isinstance(fault, Fault) else fault
    except OSError as error:
        cause = str(error)
    else:
        return ""
    return " ".join(cause.split())[:MAX_CAUSE_LENGTH]


def _find(store: Store, key: str) -> None:
    try:
        store.get(key)
    except KeyError:
        raise FileNotFoundError("it is not there") from None


def _look_at_data(check: PreflightCheck) -> None:
    """Description and, of a folder, sizes; an object store's shards are checked as they come."""
    path = check.data_path
    found = dataset_identity(path)
    if found != check.data_identity:
        raise OSError(f"{path}/{META_FILE} describes dataset {found}, not {check.data_identity}")
    if not is_remote(path):
        raise_faults(RaymegaError, size_faults(local_folder(path), read_meta(local_folder(path))))


def _has_written(result: PreflightResult) -> bool:
    return not result.sees_driver and not result.writes


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
            fact=f"node {name} does not see the data of data.path={check.data_path!r} "
            f"({result.sees_data})",
            rule="every node that hosts workers reads the dataset that the driver reads",
            remedy="put the dataset on an object store or a file system that all nodes share, or "
            "copy it to the same path on each node",
        )


def _unseen_by_driver(name: str, check: PreflightCheck, why: str) -> Fault:
    return _not_shared(
        f"the driver does not see what node {name} wrote to {check.store_uri} ({why})"
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
