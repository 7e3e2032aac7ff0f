"""Kinds of faults, phases of a run, their notation on the command line, and random faults.

Pure functions; `chaos/fault_injector.py` injects faults.
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
"""spawn: a process imports torch. rendezvous: before the ranks' rendezvous. restore: model and optimizer
are built, the state is not read yet. replan: as rendezvous, on a smaller grid than the job's. step: a step
begins. snapshot: a step is done, its snapshot is not taken yet. upload: a rank has written its part of a
checkpoint, which is not committed yet."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """Kind of fault.

    Attributes:
        family: Target of the fault: ``worker``, ``node``, ``driver`` or ``service``.
        help: Description in one line.
        phases: Phases in which it can be injected; in others it would equal one of these.
        needs_network: Whether nodes need network namespaces of their own, as `chaos/network.py` creates.
    """

    family: str
    help: str
    phases: tuple[str, ...] = PHASES
    needs_network: bool = False

    @property
    def ends_attempt(self) -> bool:
        """True where the driver must detect it and start another attempt."""
        return self.family != "service"


KINDS: Mapping[str, FaultKind] = {
    # workers; before its training thread starts, none can raise
    "kill-worker": FaultKind("worker", "SIGKILL to the process of a rank"),
    "hang": FaultKind("worker", "SIGSTOP to the process of a rank, without SIGCONT"),
    "raise": FaultKind("worker", "an exception in the training thread of one rank", PHASES[1:]),
    # nodes
    "kill-node": FaultKind("node", "SIGKILL to a node's raylet and to all its processes"),
    "freeze-node": FaultKind("node", "SIGSTOP to a node's raylet and to all its processes"),
    "link-down": FaultKind(
        "node", "the network link of a node is cut; its processes keep running", needs_network=True
    ),
    "drain-node": FaultKind(
        "node", "Ray gets a preemption notice for a node, which is killed at the deadline"
    ),
    # the driver
    "kill-driver": FaultKind("driver", "SIGKILL to the driver; the same command is started again"),
    "stop-driver": FaultKind("driver", "SIGTERM to the driver; the same command is started again"),
    # services
    "store-errors": FaultKind("service", "every write to the store fails for a while"),
    "store-slow": FaultKind(
        "service", "every write to the store takes one second longer for a while"
    ),
    "disk-full": FaultKind("service", "writes to the store fail half-way with ENOSPC for a while"),
    "mlflow-down": FaultKind("service", "MLflow's database refuses writes for a while"),
}

ALIASES = {"freeze-worker": "hang"}
DRAWN = ("kill-worker", "raise", "kill-node", "store-errors", "store-slow", "kill-driver")
"""Kinds of random faults by default; a hang costs a timeout and must be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosFault:
    """Fault to be injected.

    Attributes:
        kind: Kind of fault, a key of KINDS.
        phase: Phase of the run, one of PHASES.
        at: First attempt (START_PHASES) or first step (STEP_PHASES) at which to inject it.
        rank: Rank whose worker or node is hit; -1 is the first rank that reaches the phase.
    """

    kind: str
    phase: str
    at: int
    rank: int = -1

    def describe(self) -> str:
        """Return the fault as written on the command line."""
        phase = "" if self.phase == "step" else f"{self.phase}:"
        return f"{self.kind}@{phase}{self.at}"


def parse_faults(text: str, *, rank_of: Sequence[int] = ()) -> list[ChaosFault]:
    """Parse a list such as ``kill-worker@5,hang@9,kill-node@restore,store-slow@upload:6``.

    Args:
        text: Faults as KIND@STEP, KIND@PHASE, or KIND@PHASE:N from step or attempt N on.
        rank_of: Rank of each fault; without one, the first rank that reaches the phase.

    Raises:
        ValueError: Some faults are malformed; its arguments hold one Mistake for each.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    mistakes = [mistake for word in words if (mistake := _mistake(word))]
    if not words:
        mistakes = [
            Mistake(
                fact="--fault names nothing",
                rule="the list must have at least one fault",
                remedy="write kill-worker@5, or use --mtbf SECONDS",
            )
        ]
    if mistakes:
        raise ValueError(*mistakes)
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
    """Return the first attempt or step that has this phase: 2 for phases of a restart, else 1."""
    return 2 if phase in ("restore", "replan") else 1


def _mistake(word: str) -> Mistake | None:
    kind, sign, when = word.partition("@")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        # unknown kind
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.0)
        return Mistake(
            fact=f"--fault {word!r} names no fault",
            rule=f"faults are {', '.join(KINDS)}",
            remedy=f"did you mean {near[0]}?",
        )
    # malformed or unknown phase
    phase, _, at = ("step", "", when) if when.isdigit() else when.partition(":")
    if not sign or phase not in PHASES or (at and not at.isdigit()):
        return Mistake(
            fact=f"--fault {word!r} does not say when",
            rule=f"a fault is injected at a step ({kind}@5) or in a phase ({kind}@restore, "
            f"{kind}@upload:6); phases are {', '.join(PHASES)}",
            remedy=f"write {kind}@5",
        )
    # phase in which this kind makes no sense
    if phase not in KINDS[kind].phases:
        return Mistake(
            fact=f"--fault {word!r} is not possible in phase {phase}",
            rule=f"{kind} is possible in {', '.join(KINDS[kind].phases)}",
            remedy=f"write {kind}@{KINDS[kind].phases[0]}",
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledFault:
    """Random fault, ``after_s`` seconds after the recovery from the previous one."""

    kind: str
    after_s: float
    rank: int


def draw_faults(
    *, mtbf_s: float, seed: int, world_size: int, kinds: Sequence[str] = DRAWN
) -> Iterator[ScheduledFault]:
    """Yield random faults without end: exponential times of mean ``mtbf_s``, uniform kinds and ranks."""
    draw = Random(seed)
    while True:
        yield ScheduledFault(
            kind=draw.choice(list(kinds)),
            after_s=draw.expovariate(1.0 / mtbf_s),
            rank=draw.randrange(world_size),
        )


def draw_victims(num_faults: int, *, seed: int, world_size: int) -> list[int]:
    """Return a random rank for each fault of a list."""
    draw = Random(seed)
    return [draw.randrange(world_size) for _ in range(num_faults)]
