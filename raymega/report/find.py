"""Finds the records of a run on this machine from what a user gives: a name, a folder, a URI."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from shlex import quote

from raymega.config.schema import CheckpointSection
from raymega.errors import ConfigError, Fault
from raymega.orchestrate.run_store.journal import RECORD_KEY
from raymega.storage.registry import driver_folder, local_path, open_store
from raymega.tracking.history import METRICS_FILE

MOST_NAMED = 5
"""Most runs that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """Place of a run's records.

    Attributes:
        folder: Folder of the driver's files on this machine.
        uri: URI of the run's store.
    """

    folder: Path
    uri: str

    @property
    def metrics(self) -> Path:
        """Path of metrics.jsonl."""
        return self.folder / METRICS_FILE


def find_run(text: str) -> RunPlace:
    """Return the place of a run: its name below the default root, its folder, URI or metrics.jsonl.

    Raises:
        ConfigError: No run's records are there.
    """
    open_store(text)  # refuses schemes that no run has
    root = Path(CheckpointSection().uri)
    given = local_path(text)
    # metrics.jsonl itself stands for its folder
    if given is not None and given.name == METRICS_FILE:
        given = given.parent
    # a bare name is a run below the default root, unless a folder here has that name
    if given is not None and not given.exists() and "/" not in text and (root / text).is_dir():
        given = root / text
    place = RunPlace(
        folder=given or driver_folder(text), uri=str(given) if given is not None else text
    )
    if not place.metrics.is_file():
        raise ConfigError(_absence(text, place, root))
    return place


def _absence(text: str, place: RunPlace, root: Path) -> Fault:
    """Return the fault of a place without metrics.jsonl, by what is there instead."""
    rule = f"RUN is a run's folder <checkpoint.uri>/<run.name>, with the driver's {METRICS_FILE}"
    below = _runs_in(place.folder)
    if below:
        return Fault(
            fact=f"{text!r} holds runs and is none itself: {', '.join(below[:MOST_NAMED])}",
            rule=rule,
            remedy=f"raymega report {quote(str(place.folder / below[0]))}",
        )
    if (place.folder / RECORD_KEY).is_file() or local_path(text) is None:
        return Fault(
            fact=f"there is no {place.metrics}",
            rule=f"{METRICS_FILE} is written by the driver, on the driver's machine, from its first event on",
            remedy=f"run this command on the machine that ran the driver, or copy its {METRICS_FILE} here "
            "and give the file",
        )
    known = _runs_in(root)
    near = get_close_matches(Path(text).name, known, n=1, cutoff=0.0)
    there = f"; in {root} are {', '.join(known[:MOST_NAMED])}" if known else ""
    return Fault(
        fact=f"there is no run at {text!r}{there}",
        rule=rule,
        remedy=f"raymega report {quote(str(root / near[0]))}"
        if near
        else "raymega train jobs/verify.yaml",
    )


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in ``folder``, newest first."""
    try:
        found = [path for path in folder.glob(f"*/{METRICS_FILE}") if path.is_file()]
        return [path.parent.name for path in sorted(found, key=_age)]
    except OSError:
        return []


def _age(path: Path) -> float:
    return -path.stat().st_mtime
