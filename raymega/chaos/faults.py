"""The faults there are, the phases of a run that they can meet, how both are written, and draws of them.

Pure. How a fault is inflicted is fault_injector's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random

from raymega.errors import Fault as Mistake

START_PHASES = ("spawn", "rendezvous", "restore", "replan")
STEP_PHASES = ("step", "snapshot", "upload")
PHASES = (*START_PHASES, *STEP_PHASES)
"""spawn: a process loads what training takes. rendezvous: ranks are about to meet. restore: model and
optimizer are built, the state is about to be read. replan: as rendezvous, on a smaller grid than the
job's. step: a step begins. snapshot: it is over, and its snapshot is not taken. upload: a rank has
written its part of a checkpoint, which is not committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        family: Who inflicts it: ``worker``, ``node``, ``driver`` or ``service``.
        help: What happens, one line.
        ends_attempt: The driver must notice it and begin another attempt.
        phases: In which it can come; in others it would be the same as in one of these.
        needs_network: It takes nodes with cables, which not every machine can make; see network.
    """

    family: str
    help: str
    ends_attempt: bool
    phases: tuple[str, ...] = PHASES
    needs_network: bool = False


KINDS: Mapping[str, FaultKind] = {
    "kill-worker": FaultKind(
        family="worker", help="SIGKILL to the process of a rank", ends_attempt=True
    ),
    "hang": FaultKind(
        family="worker", help="SIGSTOP to the process of a rank, for good", ends_attempt=True
    ),
    "raise": FaultKind(
        family="worker",
        help="an exception in the training thread of one rank",
        ends_attempt=True,
        phases=tuple(phase for phase in PHASES if phase != "spawn"),  # no training thread yet
    ),
    "kill-node": FaultKind(
        family="node", help="SIGKILL to a node's raylet and to all its processes", ends_attempt=True
    ),
    "freeze-node": FaultKind(
        family="node", help="SIGSTOP to a node's raylet and to all its processes", ends_attempt=True
    ),
    "link-down": FaultKind(
        family="node",
        help="the cable of a node is pulled; it works on, and nobody hears of it",
        ends_attempt=True,
        needs_network=True,
    ),
    "drain-node": FaultKind(
        family="node",
        help="Ray is told that a node will be taken away, and at the deadline it is",
        ends_attempt=True,
    ),
    "kill-driver": FaultKind(
        family="driver", help="SIGKILL to the driver; the same command again", ends_attempt=True
    ),
    "stop-driver": FaultKind(
        family="driver", help="SIGTERM to the driver; the same command again", ends_attempt=True
    ),
    "store-errors": FaultKind(
        family="service", help="each write to the store fails, for a while", ends_attempt=False
    ),
    "store-slow": FaultKind(
        family="service", help="each write to the store takes a second more", ends_attempt=False
    ),
    "disk-full": FaultKind(
        family="service", help="writes to the store fail half-way: no space", ends_attempt=False
    ),
    "mlflow-down": FaultKind(
        family="service", help="MLflow's database refuses writes, for a while", ends_attempt=False
    ),
}

ALIASES = {"freeze-worker": "hang"}
DRAWN = ("kill-worker", "raise", "kill-node", "store-errors", "store-slow", "kill-driver")
"""Faults that are drawn when no kind is named; hangs cost a timeout each and must be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosFault:
    """One fault that is to come.

    Attributes:
        kind: Key of KINDS.
        phase: When in the run; one of PHASES.
        at: For phases of a start the first attempt that it may meet, for those of a step the step.
        rank: Whose worker or whose node; -1 is the first that comes by.
    """

    kind: str
    phase: str
    at: int
    rank: int = -1

    def describe(self) -> str:
        """As it is written on the command line."""
        return f"{self.kind}@{self.at}" if self.phase == "step" else self._in_phase()

    def _in_phase(self) -> str:
        return f"{self.kind}@{self.phase}:{self.at}"


def parse_faults(text: str, *, rank_of: Sequence[int] = ()) -> list[ChaosFault]:
    """``kill-worker@5,hang@9,kill-node@restore,store-slow@upload:6`` in this order.

    Args:
        text: Kinds at a step, in a phase, or in a phase from a step or attempt on.
        rank_of: The victim of each; without one, the first rank that comes by.

    Raises:
        ValueError: With one Mistake for each fault that is written wrong.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    mistakes = [mistake for word in words if (mistake := _mistake(word))]
    if mistakes or not words:
        raise ValueError(*(mistakes or [_nothing()]))
    ranks = [*rank_of, *[-1] * len(words)]
    return [_parse(word, rank) for word, rank in zip(words, ranks, strict=False)]


def _parse(word: str, rank: int) -> ChaosFault:
    kind, _, when = word.partition("@")
    kind = ALIASES.get(kind, kind)
    if when.isdigit():
        return ChaosFault(kind=kind, phase="step", at=int(when), rank=rank)
    phase, _, at = when.partition(":")
    return ChaosFault(kind=kind, phase=phase, at=int(at or first_of(phase)), rank=rank)


def first_of(phase: str) -> int:
    """The first attempt or step at which there is something to meet."""
    return 2 if phase in ("restore", "replan") else 1


def _mistake(word: str) -> Mistake | None:
    kind, sign, when = word.partition("@")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.0)
        return Mistake(
            fact=f"--fault {word!r} names no fault",
            rule=f"faults are {', '.join(KINDS)}",
            remedy=f"nearest is {near[0]}",
        )
    phase, _, at = ("step", "", when) if when.isdigit() else when.partition(":")
    if not sign or phase not in PHASES or (at and not at.isdigit()):
        return Mistake(
            fact=f"--fault {word!r} does not say when",
            rule=f"a fault comes at a step ({kind}@5) or in a phase ({kind}@restore, "
            f"{kind}@upload:6); phases are {', '.join(PHASES)}",
            remedy=f"write {kind}@5",
        )
    if phase not in KINDS[kind].phases:
        return Mistake(
            fact=f"--fault {word!r} cannot come in phase {phase}",
            rule=f"{kind} comes in {', '.join(KINDS[kind].phases)}",
            remedy=f"write {kind}@{KINDS[kind].phases[0]}",
        )
    return None


def _nothing() -> Mistake:
    return Mistake(
        fact="--fault names nothing",
        rule="a list of faults has at least one",
        remedy="write kill-worker@5, or use --mtbf SECONDS",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledFault:
    """A fault at a time: ``after_s`` seconds after the one before was made good."""

    kind: str
    after_s: float
    rank: int


def draw_faults(
    *, mtbf_s: float, seed: int, world_size: int, kinds: Sequence[str] = DRAWN
) -> Iterator[ScheduledFault]:
    """Without end: exponential times of mean ``mtbf_s``, kinds and victims alike by chance."""
    draw = Random(seed)
    while True:
        yield ScheduledFault(
            kind=draw.choice(list(kinds)),
            after_s=draw.expovariate(1.0 / mtbf_s),
            rank=draw.randrange(world_size),
        )


def draw_victims(num_faults: int, *, seed: int, world_size: int) -> list[int]:
    """The rank of each fault of a list."""
    draw = Random(seed)
    return [draw.randrange(world_size) for _ in range(num_faults)]
