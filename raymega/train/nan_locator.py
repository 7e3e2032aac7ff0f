"""Numbers that are not finite: where they come from, and that they end a run before they spread.

When a step is lost, a second pass over the same micro-batches looks at every tensor. It changes no
parameter, and costs nothing while all is well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.errors import Fault, NumericsError, RollbackError
from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.context_parallel.context import MicroBatch
from raymega.train.bad_steps import BadNumbers
from raymega.train.build import TrainingComponents
from raymega.train.forward_backward import forward_backward
from raymega.train.module_hooks import TensorObservation, hook_modules

FINDING_BYTES = 512
FORMS = {
    "weight": "the weight {name} holds it before the step",
    "input": "it enters {name} from what is computed before it",
    "output": "{name} makes it from finite inputs, in forward",
    "gradient": "the gradient by the output of {name} is the first, in backward",
    "weight gradient": "the gradient of {name} is the first, in backward",
}


def refuse_step(fact: str, *, numbers: BadNumbers, roll_back_to: int = -1) -> NumericsError:
    """The error that ends the attempt at a step whose numbers are no good, as the job wishes.

    With ``roll_back_to``, a sample, the run goes back and passes over the data before it.
    """
    rule = (
        "both must be finite numbers"
        if numbers.kind == "nan"
        else f"elastic.on_spike={numbers.policy}"
    )
    remedy = "lower optimizer.lr, raise precision.dtype or look at the data of this step"
    fault = Fault(fact=fact, rule=f"{rule}; the parameters were not updated", remedy=remedy)
    if roll_back_to < 0:
        return NumericsError(fault)
    error = RollbackError(fault)
    error.next_sample = roll_back_to
    return error


def refuse_non_finite_state(parts: TrainingComponents, step: int) -> None:
    """Keep parameters or moments that are no finite numbers out of a checkpoint.

    Raises:
        NumericsError: Some are not; the checkpoint before stays the newest.
    """
    for block in parts.optimizer.blocks():
        if not _is_finite(block.values):
            raise NumericsError(
                Fault(
                    fact=f"after step {step}: {block.kind} of {block.tensor.name} is not finite",
                    rule="a checkpoint holds finite numbers only; the one before is kept",
                    remedy="lower optimizer.lr, raise precision.dtype or look at the data",
                )
            )


def locate_non_finite(
    parts: TrainingComponents, micro_batches: Sequence[MicroBatch], *, loss_gradient: float
) -> str:
    """Where the first number that is not finite arises, in words that are equal on all ranks.

    First is by the flow of data: weights, then forward before backward, by micro-batch, stage and
    order within the stage.
    """
    search = _Search(parts)
    search.look_at_weights()
    with hook_modules(parts.modules, search.see):
        forward_backward(parts, micro_batches, loss_gradient=loss_gradient)
    findings = [finding for finding in _from_all_ranks(search.first, parts) if finding]
    if not findings:
        return "a second pass found every weight, activation and gradient finite on its own"
    return _in_words(min(findings, key=lambda finding: (*finding.order, finding.rank)), parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """``order`` sorts findings by the flow of data: direction, micro-batch, stage, count."""

    order: tuple[int, int, int, int]
    kind: str
    name: str
    micro_batch: int
    rank: int


class _Search:
    """Looks at what passes on one rank and keeps what comes first."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts, self._count = parts, 0
        self._rank = parts.groups.world.index
        self.first: _Finding | None = None

    def look_at_weights(self) -> None:
        for block in self._parts.optimizer.blocks():
            if block.kind == WEIGHTS and not _is_finite(block.values):
                self._keep("weight", block.tensor.name, micro_batch=-1, order=(-1, 0, 0, 0))

    def see(self, seen: TensorObservation) -> None:
        """Every look counts, so that the ranks of one stage count alike."""
        self._count += 1
        if _is_finite(seen.tensor):
            return
        is_backward = "gradient" in seen.kind
        stage = self._parts.plan.stages_of(self._rank)[seen.chunk].index
        self._keep(
            seen.kind,
            seen.name,
            micro_batch=seen.micro_batch,
            order=(
                int(is_backward),
                seen.micro_batch,
                -stage if is_backward else stage,
                self._count,
            ),
        )

    def _keep(
        self, kind: str, name: str, *, micro_batch: int, order: tuple[int, int, int, int]
    ) -> None:
        if self.first is None or order < self.first.order:
            self.first = _Finding(
                order=order, kind=kind, name=name, micro_batch=micro_batch, rank=self._rank
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _from_all_ranks(mine: _Finding | None, parts: TrainingComponents) -> list[_Finding | None]:
    """Each rank's finding, as text of a fixed length."""
    text = json.dumps(asdict(mine) if mine else None).encode().ljust(FINDING_BYTES)
    tensor = torch.tensor(list(text[:FINDING_BYTES]), dtype=torch.uint8, device=parts.device)
    rows = all_gather(tensor, parts.groups.world).view(-1, FINDING_BYTES).cpu()
    return [_read(bytes(row.tolist())) for row in rows]


def _read(text: bytes) -> _Finding | None:
    values = json.loads(text)
    return _Finding(**values | {"order": tuple(values["order"])}) if values else None


def _in_words(finding: _Finding, parts: TrainingComponents) -> str:
    stage = parts.plan.stages[abs(finding.order[2])]
    whole = "the loss" if stage.is_last else f"stage {stage.index}"
    at = parts.plan.grid.coords(finding.rank)
    what = FORMS[finding.kind].format(name=finding.name or whole)
    batch = "" if finding.micro_batch < 0 else f"micro-batch {finding.micro_batch}, "
    return f"{what}: {batch}rank {finding.rank} (tp {at.tp}, cp {at.cp}, pp {at.pp}, dp {at.dp})"
