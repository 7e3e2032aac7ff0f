"""The run's record in its store: who the run is, how often it was attempted, how it stands.

It owns `run.json` and the rule which changes of a job continue a run. How far a run got is the
manifests' to say; the record repeats it for people.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from raymega.checkpoint.keys import checkpoint_of
from raymega.checkpoint.manifest import list_manifests
from raymega.config.schema import DataSection, Job, ModelSection
from raymega.data.checks import dataset_identity
from raymega.errors import ConfigError, Fault, RaymegaError, StorageError, raise_faults
from raymega.plan.state_size import DTYPE_BYTES
from raymega.storage.store import Store

log = logging.getLogger(__name__)

RECORD_KEY = "run.json"
CLAIMS = "attempts/"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run's record.

    Attributes:
        version: Of this layout.
        run_id: The run's own id, from its first driver on.
        name: The job's ``run.name``.
        identity: What cannot change in a run's life: model, seed, data and the kind of optimizer,
            as plain values.
        num_attempts: Worker groups started so far; the next one has the next number.
        status: Name of the State that the last driver left.
        step: Steps that were committed when the record was written.
        total_steps: The job's ``run.steps``.
        updated: When it was written.
    """

    version: int = VERSION
    run_id: str
    name: str
    identity: dict[str, Any]  # values of a job file: plain JSON
    num_attempts: int = 0
    status: str
    step: int = 0
    total_steps: int
    updated: str

    def with_attempt(self) -> RunRecord:
        """One more attempt."""
        return replace(self, num_attempts=self.num_attempts + 1)


def open_record(store: Store, job: Job, *, now: str) -> RunRecord:
    """The record to go on with: the stored one, or a new one that is not written yet.

    Raises:
        ConfigError: The store holds a run of that name with another model, seed or data.
    """
    stored = read_record(store)
    if stored is None:
        return RunRecord(
            run_id=uuid.uuid4().hex[:12],
            name=job.run.name,
            identity=_identity(job),
            status="new",
            total_steps=job.run.steps,
            updated=now,
        )
    raise_faults(ConfigError, identity_faults(stored, job))
    return replace(stored, total_steps=job.run.steps, updated=now)


def read_record(store: Store) -> RunRecord | None:
    """The stored record, or None for a run that was never begun.

    Raises:
        StorageError: There is one that this version cannot read.
    """
    try:
        text = store.get(RECORD_KEY)
    except KeyError:
        return None
    try:
        record = RunRecord(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StorageError(_unreadable(store, str(error))) from error
    if record.version != VERSION:
        raise StorageError(_unreadable(store, f"version {record.version}"))
    return record


def write_record(store: Store, record: RunRecord) -> None:
    """Put the record in the place of the one before."""
    text = json.dumps(asdict(record), indent=2, sort_keys=True)
    store.put(RECORD_KEY, [text.encode()], overwrite=True)


def write_quietly(store: Store, record: RunRecord) -> None:
    """:func:`write_record` where a failure is only logged: manifests and claims say it all too."""
    try:
        write_record(store, record)
    except RaymegaError as error:
        log.warning("the run's record was not written: %s", error)


def claim_attempt(store: Store, *, now: str) -> int:
    """Take the next attempt's number; a create-only put lets no two drivers have the same.

    The newest claim also says who may commit: an older driver that still lives is to stop. The
    number is above that of every checkpoint too, which a copy from another store may have brought.
    """
    copied = [at.attempt for key in list_manifests(store) if (at := checkpoint_of(key))]
    number = max(newest_attempt(store), *copied, 0) + 1
    while True:
        try:
            store.put(f"{CLAIMS}{number:06d}.json", [_claim(now)], overwrite=False)
        except FileExistsError:
            number += 1
        else:
            return number


def newest_attempt(store: Store) -> int:
    """Highest number that any driver has claimed; 0 for a run that was never begun."""
    numbers = [key.removeprefix(CLAIMS).removesuffix(".json") for key in store.list(CLAIMS)]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def precision_faults(saved: Mapping[str, Any], job: Job) -> list[Fault]:
    """The fault of a run whose checkpoint holds wider numbers than the job would keep."""
    before = saved.get("precision", {}).get("dtype")
    now = job.precision.dtype
    if before not in DTYPE_BYTES or _master_bytes(before) <= _master_bytes(now):
        return []
    return [
        Fault(
            fact=f"precision.dtype={now!r}",
            rule=f"the run's checkpoint was written with {before!r}, whose masters are wider, and a "
            "run does not drop digits by itself",
            remedy=f"set precision.dtype={before}, or take another run.name",
        )
    ]


def _master_bytes(dtype: str) -> int:
    return max(4, DTYPE_BYTES[dtype])


def _claim(now: str) -> bytes:
    return json.dumps({"claimed": now}).encode()


def identity_faults(record: RunRecord, job: Job) -> list[Fault]:
    """Every field of the job that would make another run of it."""
    then, now = dict(_flatten(record.identity)), dict(_flatten(_identity(job)))
    then = dict(_flatten(_DEFAULTS)) | then
    return [
        Fault(
            fact=f"{path}={now[path]!r}",
            rule=f"run {record.name!r} was begun with {path}={then[path]!r}, and a run keeps its "
            "model, seed, data and optimizer.name",
            remedy=f"set {path}={then[path]} to continue it, or take another run.name",
        )
        for path in sorted(now)
        if path in then and now[path] != then[path]
    ]


def _identity(job: Job) -> dict[str, Any]:
    """Data are known by their content, so that a dataset may move but not change."""
    kept: Any = {"model": True, "data": True, "run": {"seed"}, "optimizer": {"name"}}
    plain = dict(job.model_dump(mode="json", include=kept))
    del plain["data"]["path"]
    plain["data"]["content"] = dataset_identity(job.data.path)
    return plain


_DEFAULTS: dict[str, Any] = {
    name: {
        field: json.loads(json.dumps(info.default, default=lambda part: part.model_dump()))
        for field, info in section.model_fields.items()
        if not info.is_required()
    }
    for name, section in (("model", ModelSection), ("data", DataSection))
}
"""What the record of a build that had not a field yet stands for, as JSON has it."""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _unreadable(store: Store, why: str) -> Fault:
    return Fault(
        fact=f"{store.uri}/{RECORD_KEY} cannot be read ({why})",
        rule=f"it must be a run's record of version {VERSION}",
        remedy="use the raymega that wrote it, or take another run.name",
    )
