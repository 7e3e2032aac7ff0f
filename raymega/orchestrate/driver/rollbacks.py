"""The run's record of its rollbacks: which steps are undone, and which samples it passes over for good.

One small object each, so that a driver that takes the run up keeps to them. When to roll back is
policies', and what the next attempt starts from restore's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from raymega.errors import Fault, StorageError
from raymega.storage.store import Store

ROLLBACKS = "rollbacks/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A run went back.

    Attributes:
        attempt: The one that was ended for it.
        from_step: Steps that it had completed.
        to_step: Step of the state that it went back to.
        samples: The first one that this state had not consumed, and where the data go on.
        cause: Why, for people.
    """

    attempt: int
    from_step: int
    to_step: int
    samples: tuple[int, int]
    cause: str

    @property
    def passes_over(self) -> bool:
        """Some samples are left out; else the same steps are done again."""
        return self.samples[1] > self.samples[0]


def write_rollback(store: Store, rollback: Rollback) -> None:
    """Put it on record."""
    text = json.dumps(asdict(rollback), indent=2, sort_keys=True)
    store.put(f"{ROLLBACKS}a{rollback.attempt:04d}.json", [text.encode()], overwrite=True)


def read_rollbacks(store: Store) -> tuple[Rollback, ...]:
    """All of the run, oldest first.

    Raises:
        StorageError: One cannot be read, so that nobody knows what the run has left out.
    """
    found = []
    for key in store.list(ROLLBACKS):
        try:
            values = json.loads(store.get(key))
            first, end = values.pop("samples")
            found.append(Rollback(samples=(first, end), **values))
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(_unreadable(store, key, error)) from error
    return tuple(found)


def _unreadable(store: Store, key: str, error: Exception) -> Fault:
    return Fault(
        fact=f"{store.uri}/{key} cannot be read ({error})",
        rule="it says which samples the run passes over",
        remedy="repair it, or take another run.name",
    )
