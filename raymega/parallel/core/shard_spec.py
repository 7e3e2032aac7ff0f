"""ShardSpec: the blocks of global tensors that a parameter holds, and which ranks hold them too.

Optimizer, clipping, checkpoint and initialisation all read it. The module loads no torch;
`plan/layers/global_tensor.py` computes the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.box import Box
from raymega.plan.grid import ExpertPlace
from raymega.plan.layers.global_tensor import WHOLE_EXPERTS, GlobalTensor, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A block of one global tensor, and its place in a local parameter.

    Attributes:
        tensor: The global tensor.
        box: Block of that tensor, in global indices.
        local: Place in the parameter, in local indices; same shape as ``box``.
        is_primary: True where this rank's copy counts in norms and is saved. Replicas over dp are not
            told apart here: all of them hold the same.
        is_partial_over_tp: True where other tp ranks hold the same block, and the gradient of each is
            one term of a sum over them.
    """

    tensor: GlobalTensor
    box: Box
    local: Box
    is_primary: bool
    is_partial_over_tp: bool

    @property
    def place(self) -> tuple[slice, ...]:
        """Slices of the block in the parameter."""
        return self.local.within(Box.whole(self.local.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """A parameter's place in the whole model.

    A fused parameter (q, k, v; gate, up) has several pieces, stacked along dim 0. Those of experts are
    stacked along dim 1, so that each expert's part is contiguous.

    Attributes:
        pieces: Blocks that tile the parameter, in local order.
        is_tied: True where the first and the last stage each have a copy, whose gradients are summed
            over the embedding group.
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
        """Dim along which the pieces are stacked: 1 for fused expert tensors, whose dim 0 is the expert."""
        return _stack_dim(tuple(piece.tensor for piece in self.pieces))

    @property
    def is_partial_over_tp(self) -> bool:
        """True where some piece's gradient is one term of a sum over tp ranks."""
        return any(piece.is_partial_over_tp for piece in self.pieces)

    @property
    def is_expert(self) -> bool:
        """True where its replicas are the edp ranks, not the dp * cp ranks; fused tensors are alike."""
        return self.pieces[0].tensor.is_expert

    @property
    def is_trained(self) -> bool:
        """True where the optimizer updates it; fused tensors are alike."""
        return self.pieces[0].tensor.is_trained

    @property
    def is_frozen(self) -> bool:
        """True where it is a weight that the job does not train."""
        return self.pieces[0].tensor.is_frozen

    @property
    def base_dtype(self) -> str:
        """Format of frozen weights that are held as codes, or ``compute``; fused tensors are alike."""
        return self.pieces[0].tensor.base_dtype

    @property
    def is_wide(self) -> bool:
        """True where it is kept in float32 or better, whatever the compute dtype."""
        return any(piece.tensor.is_wide for piece in self.pieces)

    @property
    def role(self) -> Role:
        """Role of the tensors for the optimizer; fused tensors are alike."""
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
    """Return the spec of the parameter that stacks the local blocks of ``tensors``.

    Args:
        tensors: Global tensors, one or several that are cut alike.
        tp: Tensor-parallel degree.
        tp_rank: Coordinate of the rank on tp.
        experts: Place of the rank on the experts' axes.
        is_sequence_parallel: True where each tp rank works on its own positions between cut layers.
        is_tied: True where another stage has a copy of the tensor.
        is_tied_copy: True for the last stage's copy, which does not count in norms and is not saved.
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
            # the first of the tp ranks that hold the block
            is_primary=not is_tied_copy and tp_rank % sharers == 0,
            # Holders that worked on other heads, tokens or positions each have one term of the gradient.
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
