"""Elements that a rank holds, by who else holds them and in which format; `state_bytes.py` makes bytes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raymega.box import Box
from raymega.plan.layers.base_blocks import (
    AT_ONCE,
    CODE_BITS,
    COMPUTE,
    TEMPORARY_BYTES,
    code_bytes,
    scale_bytes,
)
from raymega.plan.layers.global_tensor import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedElements:
    """Frozen elements of a rank that are held as codes.

    Attributes:
        base_dtype: Format of the codes.
        dense: Elements that all replicas hold.
        experts: Elements that the edp ranks with the same experts hold.
        scale_bytes: Bytes of their scales, which every rank keeps whole.
        unit: Most elements of a unit, which are decoded together for a use.
    """

    base_dtype: str = COMPUTE
    dense: int = 0
    experts: int = 0
    scale_bytes: int = 0
    unit: int = 0

    @property
    def total(self) -> int:
        """Number of all elements."""
        return self.dense + self.experts

    def plus(self, other: CodedElements, *, times: int = 1) -> CodedElements:
        """Return the sum with ``times`` times ``other``; of units the largest."""
        return CodedElements(
            base_dtype=other.base_dtype if other.total else self.base_dtype,
            dense=self.dense + times * other.dense,
            experts=self.experts + times * other.experts,
            scale_bytes=self.scale_bytes + times * other.scale_bytes,
            unit=max(self.unit, other.unit),
        )

    def held_bytes(self, ranks: int, edp: int) -> int:
        """Return the bytes of codes and scales, with the codes shared by ``ranks`` and those of experts by ``edp``."""
        if not self.total:
            return 0
        # codes are shared as sharded weights are; scales are not
        shares = -(-self.dense // ranks), -(-self.experts // edp)
        return sum(code_bytes(share, self.base_dtype) for share in shares) + self.scale_bytes

    def gathered_bytes(self, count: int) -> float:
        """Return the bytes of the codes of ``count`` elements that are gathered for a use."""
        return count * CODE_BITS.get(self.base_dtype, 0) / 8

    def passing_bytes(self, element: int, device: str, *, is_in_parts: bool) -> int:
        """Return the bytes of a unit's weights while it is used, and of the codes of two units where they are gathered.

        Args:
            element: Bytes of a weight in the compute dtype.
            device: Value of ``cluster.device``, which decides how many are decoded at a time.
            is_in_parts: Whether ranks share the codes.
        """
        codes = 2 * self.gathered_bytes(self.unit) if is_in_parts else 0
        decoding = min(AT_ONCE["cpu" if device == "cpu" else "cuda"], self.unit) * TEMPORARY_BYTES
        return self.unit * element + round(codes) + decoding


NO_CODES = CodedElements()
"""Number of elements held as codes where none is."""


def coded_elements(tensors: Iterable[tuple[GlobalTensor, Box]]) -> CodedElements:
    """Return the elements of one unit, by tensor and the rank's box of it; those not held as codes are left out."""
    found = NO_CODES
    for tensor, box in tensors:
        if tensor.base_dtype == COMPUTE:
            continue
        # all of a unit are decoded together
        count = box.num_elements
        own = CodedElements(
            base_dtype=tensor.base_dtype,
            dense=0 if tensor.is_expert else count,
            experts=count if tensor.is_expert else 0,
            scale_bytes=scale_bytes(tensor.shape, box),
            unit=found.unit + count,
        )
        found = found.plus(own)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Elements that a rank holds, by who else holds them and in which format; trained where not said.

    Attributes:
        dense: Elements that all replicas hold, the dp * cp ranks of equal tp and pp.
        experts: Elements that the edp ranks with the same experts hold.
        wide: Elements held as ``dense`` are, in float32 or better: routers.
        small: Elements of ``dense`` in vectors, which no level of sharding gathers for a use.
        tables: Elements of ``dense`` in embeddings and heads.
        blocks: Number of quantization blocks that 8-bit state of matrices and tables would have.
        block: Elements of the largest transformer block that sharding gathers for a use.
        end: Elements of the larger one of embedding and head that sharding gathers for a use.
        in_fp8: Elements of matrices that are multiplied in fp8.
        first: Elements of the unit that forward uses first, the embedding or a block.
        chunks: Number of model chunks.
        frozen: Elements of frozen matrices and tables, held as ``dense`` are.
        frozen_experts: Frozen elements held as ``experts`` are.
        frozen_small: Frozen elements that every rank holds whole: vectors and routers.
        block_sums: Elements of the largest block that gradients are summed of.
        end_sums: Elements of the larger end that gradients are summed of.
        coded: Frozen elements that are held as codes, in none of the other numbers.
    """

    dense: int = 0
    experts: int = 0
    wide: int = 0
    small: int = 0
    tables: int = 0
    blocks: int = 0
    block: int = 0
    end: int = 0
    in_fp8: int = 0
    first: int = 0
    chunks: int = 0
    frozen: int = 0
    frozen_experts: int = 0
    frozen_small: int = 0
    block_sums: int = 0
    end_sums: int = 0
    coded: CodedElements = NO_CODES

    @property
    def num_frozen(self) -> int:
        """Number of elements that are not trained."""
        return self.frozen + self.frozen_experts + self.frozen_small + self.coded.total

    @property
    def total(self) -> int:
        """Number of all trained elements."""
        return self.dense + self.experts + self.wide

    @property
    def pair(self) -> int:
        """Most elements that two neighbours in the order of use gather for a use."""
        return self.block + max(self.block, self.end)

    @property
    def pair_sums(self) -> int:
        """Most elements whose gradients two neighbours in the order of use sum."""
        return self.block_sums + max(self.block_sums, self.end_sums)

    def plus(self, other: Elements, *, times: int = 1) -> Elements:
        """Return the sum with ``times`` times ``other``, whose unit comes later; of units the largest."""
        return Elements(
            dense=self.dense + times * other.dense,
            experts=self.experts + times * other.experts,
            wide=self.wide + times * other.wide,
            small=self.small + times * other.small,
            tables=self.tables + times * other.tables,
            blocks=self.blocks + times * other.blocks,
            block=max(self.block, other.block),
            end=max(self.end, other.end),
            in_fp8=self.in_fp8 + times * other.in_fp8,
            first=self.first or other.first,
            chunks=self.chunks + times * other.chunks,
            frozen=self.frozen + times * other.frozen,
            frozen_experts=self.frozen_experts + times * other.frozen_experts,
            frozen_small=self.frozen_small + times * other.frozen_small,
            block_sums=max(self.block_sums, other.block_sums),
            end_sums=max(self.end_sums, other.end_sums),
            coded=self.coded.plus(other.coded, times=times),
        )
