"""Epochs of a run: grants that name the driver of each epoch, and the manifests that readers accept.

    lease/000003.json    the grant of epoch 3: made by a create-only put, renewed by its holder

The number of an attempt is its epoch, so the epoch is in the key of everything that the attempt
writes. A grant lists the manifests that existed when it was made. A manifest of an older epoch that
is not in that list was written later, by a driver that did not know yet that it had lost the run.
Every reader ignores it. No clock takes part in that decision. ``orchestrate/run_store/lease.py``
decides who may take a grant, and when.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from shlex import quote
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter

from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of
from raymega.storage.json_objects import DamagedError, damaged, parse_object
from raymega.storage.store import Store

log = logging.getLogger(__name__)

LEASES = "lease/"
LOGS = f"{LEASES}commits-"
"""Begin of the keys of logs of commits, by epoch."""
KEPT_GRANTS = 16
"""Number of newest grants that are kept."""
CLAIMS = "attempts/"
"""Prefix under which earlier builds claimed attempt numbers; these claims list no manifests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseHolder:
    """Identity of a driver's process, so that people and other drivers can find it.

    Attributes:
        host: Name of the driver's machine.
        pid: Process id on that machine.
        machine: Identity of the machine's boot and of the process's PID namespace.
        started: Start time of the process by the machine's clock; distinguishes processes that reuse a pid.
        token: Random identifier of this driver, unique among all drivers.
    """

    host: str
    pid: int
    machine: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _with_zone(text: str) -> str:
    """Return ``text``, a time that can be compared with others."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


Time = Annotated[str, AfterValidator(_with_zone)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Checkpoints of one attempt, of the steps ``first`` to ``last``, each ``every`` steps."""

    attempt: int
    first: int
    last: int
    every: int = 1

    def ids(self) -> Iterator[CheckpointId]:
        """Yield each of these checkpoints."""
        for step in range(self.first, self.last + 1, self.every):
            yield CheckpointId(attempt=self.attempt, step=step)


def step_ranges(manifests: Iterable[str]) -> tuple[StepRange, ...]:
    """Return the checkpoints with these manifests as ranges, in order of age."""
    found: list[StepRange] = []
    for at in sorted(filter(None, map(checkpoint_of, manifests))):
        last = found[-1] if found else None
        # one that continues the range, or the second one, which decides its interval
        if last and last.attempt == at.attempt:
            every = at.step - last.last
            if last.first == last.last or every == last.every:
                found[-1] = replace(last, last=at.step, every=every)
                continue
        found.append(StepRange(attempt=at.attempt, first=at.step, last=at.step))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGrant:
    """Grant of one epoch of a run to one driver. Times are ISO 8601, UTC.

    Attributes:
        epoch: Number of the epoch, and of the attempt that runs under it.
        holder: Driver that has the epoch.
        since: Time at which that driver took the run.
        renewed: Time of the last renewal.
        expires: Time after which another driver may take the run unless the grant is renewed.
        duration_s: Seconds from ``renewed`` to ``expires``.
        renewals: Number of renewals so far.
        is_released: Whether the driver has ended, so that another may take the run at once.
        manifests: Keys of the manifests that existed when the grant was made, in grants of earlier builds.
        checkpoints: Ranges of those checkpoints. Thousands that are kept regularly take a few lines, and each
            renewal writes the grant anew.
        has_commit_log: Whether its driver writes a log of its commits (``commit_log.py``); earlier builds do not.
    """

    epoch: int
    holder: LeaseHolder
    since: str
    renewed: str
    expires: Time
    duration_s: float
    renewals: int = 0
    is_released: bool = False
    manifests: tuple[str, ...] = ()
    checkpoints: tuple[StepRange, ...] = ()
    has_commit_log: bool = False

    @property
    def key(self) -> str:
        """Key of the grant in the run's store."""
        return grant_key(self.epoch)

    def renew(self, *, now: str, expires: str, is_released: bool = False) -> LeaseGrant:
        """Return the grant with one more renewal, at ``now``."""
        return replace(
            self,
            renewed=now,
            expires=expires,
            renewals=self.renewals + 1,
            is_released=is_released,
        )

    def to_json(self) -> bytes:
        """Return the content of the grant's object."""
        # written at each renewal: ranges by hand and in one line, as asdict and an indent take seven times as long
        ranges = [
            {"attempt": each.attempt, "first": each.first, "last": each.last, "every": each.every}
            for each in self.checkpoints
        ]
        fields = asdict(replace(self, checkpoints=())) | {"checkpoints": ranges}
        return json.dumps(fields, sort_keys=True).encode()


_ADAPTER: TypeAdapter[LeaseGrant] = TypeAdapter(LeaseGrant)


def grant_key(epoch: int) -> str:
    """Return the key of the grant of ``epoch``."""
    return f"{LEASES}{epoch:06d}.json"


def log_key(epoch: int) -> str:
    """Return the key of the log of the commits of ``epoch``."""
    return f"{LOGS}{epoch:06d}.json"


def newest_epoch(store: Store) -> int:
    """Return the highest epoch that any driver has taken; 0 for a run that was never started.

    Raises:
        StorageError: The store cannot be read.
    """
    return max(_newest(store, LEASES), _newest(store, CLAIMS))


def newest_grant(store: Store) -> LeaseGrant | None:
    """Return the sound grant of the highest epoch; None for a run that has none.

    Without a damaged grant's list, readers use the one before: they accept what was written after
    that one too. Such a checkpoint is sound, though a driver without the lease may have written it.

    Raises:
        StorageError: The store cannot be read.
    """
    for epoch in sorted(numbers_below(store, LEASES), reverse=True):
        try:
            return read_grant(store, epoch)
        except KeyError:  # given back since it was listed
            continue
        except DamagedError as error:
            log.warning("%s", error)
    return None


def damaged_epoch(store: Store, newest: LeaseGrant | None) -> int:
    """Return the highest epoch if its grant is damaged, so that ``newest`` is an older one; else 0."""
    epoch = _newest(store, LEASES)
    return epoch if epoch > (newest.epoch if newest else 0) else 0


def read_grant(store: Store, epoch: int) -> LeaseGrant:
    """Read the grant of ``epoch``.

    Raises:
        KeyError: There is no such grant.
        DamagedError: The grant is damaged.
        StorageError: The store fails.
    """
    raw, name = store.get(grant_key(epoch)), f"{store.uri}/{grant_key(epoch)}"
    rule = "it says who drives the run, and which checkpoints count; the grant before it counts instead"
    remedy = f"start the same job again, which takes a new one; raymega checkpoint list {quote(store.uri)}"
    grant = parse_object(raw, _ADAPTER, name=name, rule=rule, remedy=remedy)
    if grant.epoch != epoch:
        where = raw.find(b'"epoch"'), f"epoch: {grant.epoch}, not {epoch}"
        raise damaged(name, len(raw), where, rule=rule, remedy=remedy)
    return grant


def admitted(store: Store, manifests: Collection[str]) -> list[str]:
    """Return those of the listed keys ``manifests`` that the run's newest grant accepts.

    Raises:
        StorageError: The store cannot be read.
    """
    # They are listed before the grant is read: a manifest that came too late was written after the newer
    # grant, so a reader that has seen the manifest also finds that grant.
    grant = newest_grant(store)
    if grant is None:
        return list(manifests)
    before = checkpoints_of(grant)
    return [key for key in manifests if _is_valid(grant, before, key)]


def is_valid_epoch(grant: LeaseGrant, manifest: str) -> bool:
    """Return whether a run's newest ``grant`` accepts the manifest with the key ``manifest``."""
    return _is_valid(grant, checkpoints_of(grant), manifest)


def _is_valid(grant: LeaseGrant, before: Collection[CheckpointId], manifest: str) -> bool:
    at = checkpoint_of(manifest)
    assert at is not None, f"{manifest} is a manifest's"
    # Its own epoch or a later one, or an older epoch's manifest that was there before the grant.
    return at.attempt >= grant.epoch or at in before


def superseded_grants(store: Store, epoch: int) -> list[str]:
    """Return the keys of grants, and of their logs, that no driver needs once an attempt of ``epoch`` has begun.

    A damaged grant is replaced by the one before it, so the newest KEPT_GRANTS stay. A log is read with the
    newest grant alone; an epoch that is given back before an attempt makes the one before the newest again.
    """
    grants = numbers_below(store, LEASES)
    keys = [grant_key(old) for old in grants if old <= epoch - KEPT_GRANTS]
    return keys + [log_key(old) for old in numbers_below(store, LOGS) if old < epoch]


def checkpoints_of(grant: LeaseGrant) -> set[CheckpointId]:
    """Return the checkpoints that existed when the grant was made."""
    listed = set(filter(None, map(checkpoint_of, grant.manifests)))
    return listed.union(*(each.ids() for each in grant.checkpoints))


def _newest(store: Store, prefix: str) -> int:
    # Numbers are compared as numbers: beyond six digits the keys no longer sort by epoch.
    return max(numbers_below(store, prefix), default=0)


def numbers_below(store: Store, prefix: str) -> list[int]:
    """Return the numbers of the objects ``prefix``NNNNNN.json; beyond six digits their keys sort otherwise."""
    names = (key.removeprefix(prefix).removesuffix(".json") for key in store.list(prefix))
    return [int(name) for name in names if name.isdigit()]
