"""Epochs of a run: who may write since when, and which checkpoints a later epoch does not count.

    lease/000003.json    the grant of epoch 3: made by a create-only put, renewed by its holder

The number of an attempt is its epoch, so the epoch is in the key of everything that the attempt
writes. A grant lists the manifests that were there when it was made. A manifest of an older epoch
that it does not list came later, from a driver that had yet to learn that the run was no longer its
own: to every reader it is no checkpoint. Clocks decide nothing here. Who may take a grant, and when,
is orchestrate.lease's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from raymega.checkpoint.format.keys import checkpoint_of
from raymega.errors import Fault, StorageError
from raymega.storage.store import Store

LEASES = "lease/"
CLAIMS = "attempts/"
"""Where earlier builds claimed the numbers of their attempts; they list no manifests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseHolder:
    """A driver's process, so that people and other drivers can find it.

    Attributes:
        host: Name of its machine.
        pid: Its number there.
        machine: Which boot of which machine, and which space of process numbers in it.
        started: When the process began, by the machine's own count; tells two of one pid apart.
        token: Tells any two drivers apart.
    """

    host: str
    pid: int
    machine: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGrant:
    """One epoch of a run.

    Attributes:
        epoch: Its number, which is that of the attempt that begins under it.
        holder: Whose it is.
        since: When that driver took up the run: ISO 8601, UTC.
        renewed: When it last said that it lives.
        expires: When others may take the run if it says no more.
        duration_s: From one to the other.
        renewals: How often it was renewed.
        is_released: The driver has ended, and waits for nobody.
        manifests: Keys of the checkpoints that were there before.
    """

    epoch: int
    holder: LeaseHolder
    since: str
    renewed: str
    expires: str
    duration_s: float
    renewals: int = 0
    is_released: bool = False
    manifests: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Where it lies."""
        return grant_key(self.epoch)

    def renew(self, *, now: str, expires: str, is_released: bool = False) -> LeaseGrant:
        """The same grant, a sign of life later."""
        return replace(
            self,
            renewed=now,
            expires=expires,
            renewals=self.renewals + 1,
            is_released=is_released,
        )

    def to_json(self) -> bytes:
        """Its object."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


_ADAPTER: TypeAdapter[LeaseGrant] = TypeAdapter(LeaseGrant)


def grant_key(epoch: int) -> str:
    """Where the grant of ``epoch`` lies."""
    return f"{LEASES}{epoch:06d}.json"


def newest_epoch(store: Store) -> int:
    """The highest epoch that any driver has taken; 0 for a run that was never begun.

    Raises:
        StorageError: The store cannot be read.
    """
    return max(_newest(store, LEASES), _newest(store, CLAIMS))


def newest_grant(store: Store) -> LeaseGrant | None:
    """The grant of the highest epoch; None for a run that has none.

    Raises:
        StorageError: The store cannot be read, or holds a grant that this build cannot read.
    """
    epoch = _newest(store, LEASES)
    return read_grant(store, epoch) if epoch else None


def read_grant(store: Store, epoch: int) -> LeaseGrant:
    """The grant of ``epoch``, which exists.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        return _ADAPTER.validate_json(store.get(grant_key(epoch)))
    except (KeyError, ValidationError) as error:
        why = " ".join(str(error).split())
        raise StorageError(
            Fault(
                fact=f"{store.uri}/{grant_key(epoch)} cannot be read ({why})",
                rule="it says who drives the run, and which of its checkpoints count",
                remedy="use the raymega that wrote it, or take another run.name",
            )
        ) from error


def admitted(store: Store, manifests: Iterable[str]) -> list[str]:
    """Those of ``manifests``, keys that were listed before this call, that count.

    The order matters: a manifest that came too late was written after the newer grant, so whoever
    has seen the manifest finds the grant.

    Raises:
        StorageError: The store cannot be read.
    """
    listed = list(manifests)
    grant = newest_grant(store)
    return [key for key in listed if grant is None or is_valid_epoch(grant, key)]


def is_valid_epoch(grant: LeaseGrant, manifest: str) -> bool:
    """Whether the newest ``grant`` of a run lets the manifest of that key count."""
    at = checkpoint_of(manifest)
    assert at is not None, f"{manifest} is a manifest's"
    return at.attempt >= grant.epoch or manifest in grant.manifests


def _newest(store: Store, prefix: str) -> int:
    names = (key.removeprefix(prefix).removesuffix(".json") for key in store.list(prefix))
    return max((int(name) for name in names if name.isdigit()), default=0)
