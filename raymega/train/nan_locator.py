"""NaN and Inf: the search for their origin, and the errors that keep them out of checkpoints.

After a bad step, one more pass over the same micro-batches inspects every tensor. It changes no
parameter, and costs nothing in good steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.errors import Fault, NumericsError, RollbackError
from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.comm.world import raise_if_aborted
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
    """Return the error that ends the attempt at a bad step.

    With ``roll_back_to``, a global sample, the run restores its newest checkpoint and skips the data
    up to that sample.
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
    """Refuse to save a checkpoint with non-finite parameters or moments.

    Raises:
        NumericsError: A tensor holds NaN or Inf; the previous checkpoint stays the newest.
    """
    # One answer for all blocks: a GPU is waited for once, and again only to name the block.
    if _are_finite(block.values for block in parts.optimizer.blocks()):
        return
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
    """Return where the first non-finite number arises, in words that are equal on all ranks.

    The order is that of the data flow: weights, then forward, then backward; within these
    micro-batch, stage and module.
    """
    # local search: weights, then a pass under hooks
    search = _Search(parts)
    search.look_at_weights()
    with hook_modules(parts.modules, search.see):
        forward_backward(parts, micro_batches, loss_gradient=loss_gradient)
    # every rank learns every finding, and picks the same first one
    findings = [finding for finding in _from_all_ranks(search.first, parts) if finding]
    if not findings:
        return "a second pass found every weight, activation and gradient finite on its own"
    return _in_words(min(findings, key=lambda finding: (*finding.order, finding.rank)), parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """First non-finite tensor of a rank; ``order`` is (direction, micro-batch, stage, count)."""

    order: tuple[int, int, int, int]
    kind: str
    name: str
    micro_batch: int
    rank: int


class _Search:
    """Search of one rank, which keeps the finding that comes first in the data flow."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts, self._count = parts, 0
        self._rank = parts.groups.world.index
        self.first: _Finding | None = None

    def look_at_weights(self) -> None:
        for block in self._parts.optimizer.blocks():
            if block.kind == WEIGHTS and not _is_finite(block.values):
                self._keep("weight", block.tensor.name, micro_batch=-1, order=(-1, 0, 0, 0))

    def see(self, seen: TensorObservation) -> None:
        """Inspect one tensor; finite ones count too, so that ranks of one stage count alike."""
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
                # Backward visits stages in descending order.
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


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all are finite; each device is read from once."""
    answers: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        answers.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(each).all()) for each in answers.values())


def _from_all_ranks(mine: _Finding | None, parts: TrainingComponents) -> list[_Finding | None]:
    """Return each rank's finding; they travel as JSON, padded to FINDING_BYTES."""
    text = json.dumps(asdict(mine) if mine else None).encode().ljust(FINDING_BYTES)
    tensor = torch.tensor(list(text[:FINDING_BYTES]), dtype=torch.uint8, device=parts.device)
    rows = all_gather(tensor, parts.groups.world).view(-1, FINDING_BYTES).cpu()
    raise_if_aborted("what all ranks found")
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
