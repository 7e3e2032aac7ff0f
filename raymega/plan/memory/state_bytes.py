"""Count parameters and bytes of training state per rank, from the table of tensors.

The counts are exact except for the padding of sharded buckets, less than one element a bucket and
rank. Activations and temporary buffers of kernels are not counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raymega.config.schema import Job, ModelSection, OptimizerSection, PrecisionSection
from raymega.plan.adapters import tuned_kind
from raymega.plan.fp8_layers import fp8_blocks
from raymega.plan.grid import ExpertPlace, Grid
from raymega.plan.layers.base_blocks import COMPUTE
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import VECTOR_ROLES, GlobalTensor, Role
from raymega.plan.layers.layer_pattern import tensor_kind
from raymega.plan.memory import optimizer_state as states
from raymega.plan.memory.elements import Elements, coded_elements
from raymega.plan.memory.optimizer_state import format_of, kinds_of, state_bytes
from raymega.plan.memory.quantized_blocks import scale_boxes
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import (
    embedding_tensors,
    head_tensors,
    kinds_of_blocks,
    layer_tensors,
    like_blocks,
    mtp_tensors,
    stage_tensors,
)
from raymega.plan.zero_levels import (
    GLOO_THREADS,
    ZeroLevel,
    dp_shard_ranks,
    full_bucket_bytes,
    level_of,
)

WORKSPACE_BYTES = 32 * 2**20
"""Bytes of a workspace of cuBLAS, as ``raymega.train.environment`` sets them."""
NUMBER_BYTES = 4
"""Bytes of the update's number, which fused updates read on the device."""
MARGIN_BYTES = 8
"""Bytes of the smallest margin of a routing so far, which routers keep on the device."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    """Training state of one rank: elements, and bytes by part.

    Attributes:
        num_parameters: Number of elements that the rank holds, frozen ones too.
        num_owned: Number of those that the rank updates.
        weight_bytes: Bytes of weights, with copies in fp8, and with the codes of a frozen base.
        gradient_bytes: Bytes of gradients.
        master_bytes: Bytes of masters; 0 when the compute format is float32 or better, because the
            optimizer then works on the weights themselves.
        moment_bytes: Bytes of the optimizer's other state.
        copy_bytes: Bytes of those copies, which each step makes anew.
        fixed_bytes: Bytes that no parallelism divides: a table of cosines and one of sines for each
            model chunk, the update's number, the smallest margin of a routing, and on a GPU cuBLAS's
            workspaces, one for each thread that multiplies.
        passing_bytes: Bytes of sharded weights that are gathered for a use, and of sharded
            gradients of one micro-batch: two units of the model each, one in use and one in
            transfer. Weights of a unit that are decoded for a use are among them.
        ahead_bytes: Bytes of those weights that are gathered between steps, for the next one.
        host_bytes: Bytes of optimizer state on the host, all of it.
        update_bytes: Bytes that exist for a moment in an update or right after it, when no
            activation does; not part of the total. With optimizer state on the host these are the
            portions that are being updated.
    """

    num_parameters: int
    num_owned: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
    copy_bytes: int = 0
    fixed_bytes: int = 0
    passing_bytes: int = 0
    ahead_bytes: int = 0
    host_bytes: int = 0
    update_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts on the device."""
        return self._kept_bytes + self.passing_bytes

    @property
    def resting_bytes(self) -> int:
        """Bytes on the device between two steps."""
        return self._kept_bytes - self.copy_bytes + self.ahead_bytes

    @property
    def _kept_bytes(self) -> int:
        kept = self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes
        return kept + self.fixed_bytes


def count_parameters(model: ModelSection) -> int:
    """Return the elements of the whole model, with a tied table once and without padded rows."""
    ends = [*embedding_tensors(model), *head_tensors(model), *mtp_tensors(model)]
    blocks = (
        times * _num_parameters(layer_tensors(model, layer))
        for layer, times in like_blocks(model).items()
    )
    return _num_parameters(ends) + sum(blocks)


def _num_parameters(tensors: Iterable[GlobalTensor]) -> int:
    return sum(tensor.num_parameters for tensor in tensors)


def rank_state(job: Job, stages: Sequence[Stage], grid: Grid, *, tp_rank: int) -> StateSize:
    """Return the state of a rank with ``stages``; a tied copy on another rank counts as memory.

    With a sharded optimizer each of the ranks with the same parameters keeps its part of masters
    and moments, and all of weights and gradients.
    """
    return state_of(job, rank_elements(job, stages, grid, tp_rank=tp_rank), grid)


def rank_elements(job: Job, stages: Sequence[Stage], grid: Grid, *, tp_rank: int = 0) -> Elements:
    """Return the elements that a rank with ``stages`` holds."""
    return _ElementCounts(job.model, job.precision).of(stages, grid, tp_rank=tp_rank)


@lru_cache(maxsize=8)
class _ElementCounts:
    """Counter of the elements on ranks of one model.

    Each kind of block, and the ends, are counted once for each way to cut them.
    """

    def __init__(self, model: ModelSection, precision: PrecisionSection) -> None:
        self._model = model
        self._in_fp8 = fp8_blocks(model.num_layers, precision)
        self._known: dict[tuple[object, ...], Elements] = {}

    def of(self, stages: Sequence[Stage], grid: Grid, *, tp_rank: int) -> Elements:
        """Return the elements of a rank with ``stages``."""
        found = Elements(chunks=len(stages))
        for stage in stages:
            if stage.is_first or stage.is_last:
                found = found.plus(self._ends(stage, grid, tp_rank))
        # Blocks of one kind are equal, so each kind is counted once.
        for (layer, is_in_fp8), times in block_kinds(self._model, stages, self._in_fp8).items():
            block = self._block(layer, grid, tp_rank, is_in_fp8=is_in_fp8)
            found = found.plus(block, times=times)
        return found

    def _ends(self, stage: Stage, grid: Grid, tp_rank: int) -> Elements:
        """Return the elements of embedding, head and multi-token prediction."""
        where = stage.is_first, stage.is_last, stage.are_ends_together
        key = ("ends", *where, grid.tp, grid.ep, grid.etp, tp_rank)
        if key not in self._known:
            tensors = stage_tensors(self._model, replace(stage, num_layers=0))
            ends = _elements(tensors, grid, tp_rank)
            # A rank with both ends has two units, or one tied table that both use.
            are_two = stage.is_first and stage.is_last and not self._model.has_tied_head
            sums = (ends.dense - ends.small) // (1 + are_two)
            end = (ends.dense - ends.small + ends.frozen) // (1 + are_two)
            self._known[key] = replace(ends, end=end, end_sums=sums, first=end * stage.is_first)
        return self._known[key]

    def _block(self, layer: int, grid: Grid, tp_rank: int, *, is_in_fp8: bool) -> Elements:
        kind = tensor_kind(self._model, layer), tuned_kind(self._model, layer), is_in_fp8
        key = ("block", *kind, grid.tp, grid.ep, grid.etp, tp_rank)
        if key not in self._known:
            block = _elements(layer_tensors(self._model, layer), grid, tp_rank)
            # Vectors stay on every rank; all else is gathered for a use.
            sums = block.dense - block.small + block.experts
            unit = sums + block.frozen + block.frozen_experts
            in_fp8 = unit if is_in_fp8 else 0
            self._known[key] = replace(
                block, block=unit, block_sums=sums, first=unit, in_fp8=in_fp8
            )
        return self._known[key]


def block_kinds(
    model: ModelSection, stages: Sequence[Stage], in_fp8: range = range(0)
) -> dict[tuple[int, bool], int]:
    """Return one layer of each kind (of tensors, trained alike, in fp8) in ``stages``, and their number."""
    first: dict[tuple[object, bool], int] = {}
    counts: Counter[tuple[int, bool]] = Counter()
    kinds = kinds_of_blocks(model)
    for layer in (layer for stage in stages for layer in stage.layers):
        kind = kinds[layer], layer in in_fp8
        counts[first.setdefault(kind, layer), kind[1]] += 1
    return dict(counts)


def _elements(tensors: Sequence[GlobalTensor], grid: Grid, tp_rank: int) -> Elements:
    place = ExpertPlace(ep=grid.ep, etp=grid.etp)
    found: Counter[str] = Counter()
    boxes = [(t, t.box(tp=grid.tp, tp_rank=tp_rank, experts=place)) for t in tensors]
    for tensor, box in ((tensor, box) for tensor, box in boxes if tensor.role != "state"):
        kind = "experts" if tensor.is_expert else "wide" if tensor.is_wide else "dense"
        count = box.num_elements
        if tensor.base_dtype != COMPUTE:
            continue
        if tensor.is_frozen:
            is_whole = tensor.is_wide or tensor.role in VECTOR_ROLES
            frozen = "frozen_experts" if tensor.is_expert else "frozen"
            found["frozen_small" if is_whole else frozen] += count
            continue
        found[kind] += count
        # Every matrix and table counts in blocks, whether or not its state is in 8 bits.
        is_small = tensor.role in VECTOR_ROLES
        has_blocks = len(box.shape) > 1 and tensor.role != "filter"
        found["blocks"] += scale_boxes(box).all.num_elements if has_blocks else 0
        found["small"] += count if kind == "dense" and is_small else 0
        found["tables"] += count if tensor.role in ("embedding", "head") else 0
    return Elements(**found, coded=coded_elements(boxes))


def state_of(job: Job, held: Elements, grid: Grid) -> StateSize:
    """Return the state of a rank that holds ``held``, by what it shares with its replicas."""
    level = level_of(job.parallel)
    ranks, edp = dp_shard_ranks(job.parallel, grid.replicas), dp_shard_ranks(job.parallel, grid.edp)
    # Elements that the rank owns: its share of each group, rounded up.
    matrices = -(-(held.dense - held.small) // ranks) + -(-held.experts // edp)
    owned = matrices + -(-held.small // ranks)
    owned_wide = -(-held.wide // ranks)
    compute = DTYPE_BYTES[job.precision.dtype]
    full = max(4, compute)
    gathered, summed = held.dense + held.experts, held.total
    # What sharding takes from the rank, and what passes through buffers instead.
    passing = ahead = 0
    is_cut = max(ranks, edp * bool(held.experts)) > 1
    if level >= ZeroLevel.GRADIENTS and is_cut:
        summed = matrices + held.small + held.wide
        passing += held.pair_sums * full
    frozen = held.num_frozen - held.coded.total
    if level == ZeroLevel.PARAMETERS and is_cut:
        gathered = matrices + held.small
        frozen = -(-held.frozen // ranks) + -(-held.frozen_experts // edp) + held.frozen_small
        passing += held.pair * compute
        ahead = held.first * compute
        passing += max(held.block, held.end) * compute if _is_over_gloo(job) else 0
    is_in_parts = level == ZeroLevel.PARAMETERS and is_cut
    codes = held.coded.held_bytes(ranks, edp) if is_in_parts else held.coded.held_bytes(1, 1)
    passing += held.coded.passing_bytes(compute, job.cluster.device, is_in_parts=is_in_parts)
    # Rows and columns of a weight are multiplied by a copy each; gathered or decoded weights have none.
    copies = 0 if is_in_parts or held.coded.total else 2 * held.in_fp8
    size = StateSize(
        num_parameters=held.total + held.num_frozen,
        num_owned=owned + owned_wide,
        weight_bytes=(gathered + frozen) * compute + held.wide * full + copies + codes,
        gradient_bytes=summed * full,
        master_bytes=owned * full if compute < full else 0,
        moment_bytes=_moment_bytes(job.optimizer, held, owned + owned_wide, ranks, full),
        copy_bytes=copies,
        fixed_bytes=_fixed_bytes(job, held, full) + _scale_bytes(job.optimizer, held, full),
        passing_bytes=passing,
        ahead_bytes=ahead,
        update_bytes=_update_bytes(job, held, owned + owned_wide, full),
    )
    if "optimizer" not in job.memory.offload:
        return size
    # One portion in use, one arriving and one leaving; copies of a CPU are synchronous.
    return _with_state_on_host(size, most=2 if job.cluster.device == "cpu" else 3)


def _fixed_bytes(job: Job, held: Elements, full: int) -> int:
    model = job.model
    is_rotary = parts_of(model).has_rope
    pairs = -(-model.rope_width // 2) * is_rotary
    bases = 2 if model.attention.sliding_rope_theta else 1
    tables = 2 * bases * held.chunks * model.num_rope_positions * pairs * full + NUMBER_BYTES
    margin = MARGIN_BYTES * (model.moe.num_experts > 0)
    # forward's thread and autograd's; two passes at once multiply in these too
    workspaces = 0 if job.cluster.device == "cpu" else 2 * WORKSPACE_BYTES
    return tables + margin + workspaces


def _scale_bytes(optimizer: OptimizerSection, held: Elements, full: int) -> int:
    """Return the bytes of the buffer in which ranks reduce the scales of 8-bit state: all blocks, of every kind."""
    counts: dict[Role, int] = {"matrix": held.total - held.small - held.tables, "head": held.tables}
    kinds = {
        role: len(kinds_of(optimizer.name, role)) if format_of(optimizer, role) == "8bit" else 0
        for role in counts
    }
    numbers = sum(held.blocks * counts[role] * kinds[role] for role in counts)
    return numbers // max(1, held.total - held.small) * full


def _is_over_gloo(job: Job) -> bool:
    return job.cluster.device == "cpu"


def _update_bytes(job: Job, held: Elements, owned: int, full: int) -> int:
    """Return the temporary bytes of an update: its own, or gloo's of large buckets, whichever is more."""
    own = (
        min(states.PORTION_ELEMENTS, owned) * full * states.kind_of(job.optimizer.name).temporaries
    )
    if not _is_over_gloo(job) or level_of(job.parallel) != ZeroLevel.OPTIMIZER:
        return own
    copied = min(held.total, GLOO_THREADS * full_bucket_bytes(held.total * full) // full)
    return max(own, copied * DTYPE_BYTES[job.precision.dtype])


def _with_state_on_host(size: StateSize, *, most: int) -> StateSize:
    """Return the size with masters and moments on the host; an update has ``most`` portions here."""
    away = size.master_bytes + size.moment_bytes
    here = round(away * min(1.0, most * states.PORTION_ELEMENTS / max(1, size.num_owned)))
    return replace(
        size, master_bytes=0, moment_bytes=0, host_bytes=away,
        update_bytes=size.update_bytes + here,
    )  # fmt: skip


def _moment_bytes(
    optimizer: OptimizerSection, held: Elements, owned: int, ranks: int, full: int
) -> int:
    """Return the bytes of optimizer state of what a rank owns, and of the weights' moving average.

    Muon keeps one kind of state of matrices, and AdamW's two of the rest. The result is the mean
    over ranks that share. It ignores which rank owns a vector inside a bucket, and which blocks of
    8-bit state are cut.
    """
    # One role stands for each kind of tensor: matrices, tables, vectors.
    tables, small = -(-held.tables // ranks), -(-held.small // ranks)
    counts: dict[Role, int] = {"matrix": owned - tables - small, "head": tables, "norm": small}
    total = 0
    for role, count in counts.items():
        form, kinds = format_of(optimizer, role), kinds_of(optimizer.name, role)
        blocks = held.blocks * count // max(1, held.total - held.small)
        total += len(kinds) * state_bytes(form, count, blocks, full)
    return total + owned * full * (optimizer.ema_decay > 0)
