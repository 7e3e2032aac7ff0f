"""Exceptions that raymega raises, and the exit code of each.

`cli/output.py` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault in a job or run: the fact with its value, the rule with its numbers, the remedy."""

    fact: str
    rule: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.fact, self.rule, self.remedy)))


class RaymegaError(Exception):
    """Base class; it can be pickled, because it is built from its ``args`` alone.

    A text is a fault of which only the fact is known. ``fact``, ``rule`` and ``remedy`` are those of one
    fault, for errors that have no other.
    """

    exit_code = 1

    def __init__(
        self, *faults: Fault | str, fact: str = "", rule: str = "", remedy: str = ""
    ) -> None:
        if fact:
            faults = (*faults, Fault(fact=fact, rule=rule, remedy=remedy))
        # Unpickling calls the class with ``args``: anything else would be lost on the way from a worker.
        super().__init__(*faults)
        self.faults = tuple(
            fault if isinstance(fault, Fault) else Fault(fact=fault) for fault in faults
        )

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


class ConfigError(RaymegaError):
    """The job file is wrong; nothing was started."""

    exit_code = 2


class PlanError(RaymegaError):
    """The job asks for a run that its numbers do not allow; nothing was started."""

    exit_code = 2


class CapacityError(RaymegaError):
    """The cluster has no room for the run, or no node came in time."""

    exit_code = 3


class WorkerError(RaymegaError):
    """Workers, or the writes of the last save, failed more often than the retry budget allows."""

    exit_code = 4


class DataError(RaymegaError):
    """The data of a running job differ from their manifest."""

    exit_code = 5


class NumericsError(RaymegaError):
    """A loss, gradient or weight is NaN or Inf."""

    exit_code = 5


class LeaseError(RaymegaError):
    """Another driver holds the run, or has taken it from this one."""

    exit_code = 6


class RollbackError(NumericsError):
    """A step's numbers or a rank's weights are bad, and the job's policy is to roll back.

    ``next_sample`` is the global sample from which training continues after the restored steps; -1 skips
    no data.
    """

    next_sample = -1


class CheckpointError(RaymegaError):
    """A checkpoint is missing, torn, or of another model."""


class StorageError(RaymegaError):
    """A store refused, lost or could not serve an object."""


class CommunicationError(RaymegaError):
    """A collective or a transfer failed or timed out; usually another rank is the cause."""


class PreemptedError(RaymegaError):
    """The run was asked to stop, saved, and can be resumed."""

    exit_code = 75


class InternalError(RaymegaError):
    """A bug in raymega."""


EXIT_CODES: Mapping[int, str] = {
    0: "every step is done and saved, now or before",
    1: "anything that no other code names",
    2: "the job or the command is wrong; nothing was started",
    3: "the cluster has no room, or had none in time",
    4: "the restarts or tries of the last save are spent, or one error came three times",
    5: "the data are not what was prepared, or a number is not finite",
    6: "another driver has the run, or has taken it from this one",
    75: "stopped in good order; the same job continues the run",
    130: "ended by a second Ctrl-C",
}
"""Meaning of each exit code. `raymega --help` and docs/failures.md list all of them."""


def raise_faults(kind: type[RaymegaError], faults: Iterable[Fault]) -> None:
    """Raise one error of ``kind`` that carries every fault once, or return when there are none."""
    if found := tuple(dict.fromkeys(faults)):
        raise kind(*found)


def one_line(cause: object, most: int | None = None) -> str:
    """Return an error or a text in one line, its first ``most`` characters."""
    return " ".join(str(cause).split())[:most]


def first_few(items: Sequence[str], most: int = 5) -> str:
    """Return ``items`` for a message: all, or the first ``most`` and the number of others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"


def counted(number: int, noun: str) -> str:
    """Return a number of things for people: ``1 file``, ``2 files``, ``1,024 micro-batches``."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def duration(seconds: float) -> str:
    """Return a time for people in its two largest units, such as ``2 h 05 min`` or ``3.2 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} days {hours:02} h" if days > 1 else f"1 day {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
