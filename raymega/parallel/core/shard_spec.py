"""ShardSpec: which blocks of which global tensors a parameter is, and who else holds them.

The one answer that optimizer, clipping, checkpoint and initialisation read. Torch-free; the
arithmetic of the cut is plan.tensors'.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.messages import Box
from raymega.plan.grid import ExpertPlace
from raymega.plan.tensor_table import WHOLE_EXPERTS, GlobalTensor, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A block of one global tensor as it lies in a local parameter.

    Attributes:
        tensor: The global tensor.
        box: Which block of it, in global indices.
        local: Where it lies in the parameter, in local indices; same shape as ``box``.
        is_primary: This rank's copy is the one that counts in norms and is saved, the replicas
            apart (all of those hold the same).
        is_partial_over_tp: Other tp ranks hold the same block, and the gradient of each is one term
            of a sum over them.
    """

    tensor: GlobalTensor
    box: Box
    local: Box
    is_primary: bool
    is_partial_over_tp: bool

    @property
    def place(self) -> tuple[slice, ...]:
        """Slices that select the block in the parameter."""
        return self.local.within(Box.whole(self.local.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Everything about a parameter's place in the whole model.

    A fused parameter (q, k, v; gate, up) has several pieces, stacked along dim 0; of experts along
    dim 1, so that what belongs to one expert lies together.

    Attributes:
        pieces: Blocks that make up the parameter, in local order; they tile it.
        is_tied: A copy of the same tensor lives on the first and on the last stage, and the two
            copies' gradients are summed over the embedding group.
    """

    pieces: tuple[Piece, ...]
    is_tied: bool

    @property
    def name(self) -> str:
        """Names of the tensors, joined by '+'; for messages."""
        return "+".join(piece.tensor.name for piece in self.pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        shape, dim = list(self.pieces[0].local.shape), self.stack_dim
        shape[dim] = sum(piece.local.shape[dim] for piece in self.pieces)
        return tuple(shape)

    @property
    def stack_dim(self) -> int:
        """Along which dim the pieces follow one another; dim 0 of an expert tensor are experts."""
        return _stack_dim(tuple(piece.tensor for piece in self.pieces))

    @property
    def is_partial_over_tp(self) -> bool:
        """Some piece's gradient is one term of a sum over tp ranks."""
        return any(piece.is_partial_over_tp for piece in self.pieces)

    @property
    def is_expert(self) -> bool:
        """Its replicas are the edp ranks, not the dp * cp ranks; fused tensors are alike."""
        return self.pieces[0].tensor.is_expert

    @property
    def is_trained(self) -> bool:
        """The optimizer updates it; fused tensors are alike."""
        return self.pieces[0].tensor.is_trained

    @property
    def is_wide(self) -> bool:
        """It is kept in float32 or better."""
        return any(piece.tensor.is_wide for piece in self.pieces)

    @property
    def role(self) -> Role:
        """What the tensors are to the optimizer; fused ones are alike."""
        return self.pieces[0].tensor.role


def make_spec(  # noqa: PLR0913  # places on axes
    tensors: tuple[GlobalTensor, ...],
    *,
    tp: int,
    tp_rank: int,
    experts: ExpertPlace = WHOLE_EXPERTS,
    is_sequence_parallel: bool = False,
    is_tied: bool = False,
    is_tied_copy: bool = False,
) -> ShardSpec:
    """The spec of the parameter that stacks ``tensors``' local blocks.

    Args:
        tensors: One, or several that are cut alike.
        tp: Tensor-parallel degree.
        tp_rank: Coordinate on that axis.
        experts: The rank's place among the experts.
        is_sequence_parallel: Each tp rank works on its own positions between cut layers.
        is_tied: The tensor is shared with another stage.
        is_tied_copy: This is the last stage's copy, which does not count.
    """
    pieces, at, dim = [], 0, _stack_dim(tensors)
    for tensor in tensors:
        box = tensor.box(tp=tp, tp_rank=tp_rank, experts=experts)
        offset = [0] * len(box.shape)
        offset[dim] = at
        local = Box(offset=tuple(offset), shape=box.shape)
        sharers = tensor.sharers(tp=tp)
        piece = Piece(
            tensor=tensor,
            box=box,
            local=local,
            is_primary=not is_tied_copy and tp_rank % sharers == 0,
            is_partial_over_tp=sharers > 1
            and (
                tensor.serves_heads
                or tensor.serves_tokens
                or (is_sequence_parallel and tensor.tp_dim < 0)
            ),
        )
        pieces.append(piece)
        at += box.shape[dim]
    return ShardSpec(pieces=tuple(pieces), is_tied=is_tied)


def _stack_dim(tensors: tuple[GlobalTensor, ...]) -> int:
    return 1 if tensors[0].is_expert and len(tensors) > 1 else 0
