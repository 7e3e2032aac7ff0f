"""Initialise experts from a dense feed-forward layer, whole or cut into parts: sparse upcycling.

Komatsuzaki et al. 2022 copy the layer to every expert. He et al. 2024 (arXiv 2410.07524) also cut
it along F into G parts, so that G experts are one copy. Their router starts so that all parts of a
copy are chosen together. The module handles names, shapes and numbers alone;
``raymega.checkpoint.load.reader`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raymega.box import Box
from raymega.config.moe import MoeSection
from raymega.errors import Fault

FIELD = "checkpoint.init_upcycle"
DENSE, EXPERTS = ".mlp.", ".moe.experts."
ROUTER = ".moe.router."
BACK = ".down.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcycling:
    """Tensors of a model that start from dense layers.

    Attributes:
        sources: Name of the dense tensor that a tensor of experts copies, by the name of the
            latter.
        routers: Names of the router tensors of these experts, which start fresh.
        moe: Section ``model.moe`` of the job.
        granularity: Number of experts that make up one copy, G.
    """

    sources: Mapping[str, str]
    routers: frozenset[str]
    moe: MoeSection
    granularity: int

    def factor(self, name: str) -> float:
        """Return the factor on a tensor's elements with which the layer starts as the dense one.

        A token's weights add up to moe.routed_scaling_factor over its experts, so to a G-th of it
        over its copies. Where they are not normalised that is so for even scores, which a new
        router nearly has.
        """
        if name not in self.sources or not name.rpartition(".")[0].endswith(".down"):
            return 1.0
        # the sum of a token's weights at the start: 1, or top_k even scores
        moe = self.moe
        share = 1.0
        if not moe.norm_topk_prob:
            share = moe.top_k * (
                1 / moe.num_experts if moe.router_score_function == "softmax" else 0.5
            )
        return self.granularity / (moe.routed_scaling_factor * share)

    def router_row(self, expert: int) -> int:
        """Return the row in which a router's initial values for ``expert`` are drawn.

        All parts of a copy have the same row.
        """
        return expert - expert % self.granularity

    def boxes(self, name: str, box: Box, shape: Shape) -> Iterator[Box]:
        """Yield a dense tensor's block in the experts' tensor, once for each expert that it meets.

        Args:
            name: Name of the experts' tensor.
            box: Block of the dense tensor.
            shape: Shape of the experts' tensor, [E, F/G, D] or [E, D, F/G].

        Yields:
            The block as one expert has it; what belongs to other experts hangs over the edge.
        """
        whole = Box.whole(shape)
        dim = 1 if name.endswith(BACK) else 0
        for expert in range(shape[0]):
            offset = list(box.offset)
            # an expert's part of the features begins at its own 0
            offset[dim] -= expert % self.granularity * shape[1 + dim]
            placed = Box(offset=(expert, *offset), shape=(1, *box.shape))
            if placed.intersect(whole) is not None:
                yield placed


def make_upcycling(
    moe: MoeSection, given: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> Upcycling:
    """Return the ``wanted`` tensors of experts that a model can make from those ``given``."""
    # experts that the checkpoint lacks, in blocks whose dense layer it has
    sources = {
        new: new.replace(EXPERTS, DENSE)
        for new in wanted
        if EXPERTS in new and new not in given and new.replace(EXPERTS, DENSE) in given
    }
    parts = {_granularity(given[old], wanted[new], new) for new, old in sources.items()}
    made = {new.partition(EXPERTS)[0] for new in sources}
    return Upcycling(
        sources=sources,
        routers=frozenset(
            new for new in wanted if new.partition(ROUTER)[0] in made and ROUTER in new
        ),
        moe=moe,
        granularity=max(parts, default=1),
    )


def upcycling_faults(
    upcycling: Upcycling, given: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> list[Fault]:
    """Return the faults that keep experts from starting as the dense layers."""
    moe, parts = upcycling.moe, upcycling.granularity
    # No block was dense and has experts.
    if not upcycling.sources:
        return [
            _fault(
                "true",
                "it makes experts of dense feed-forward layers, and here is no block that has "
                "experts and was dense",
                f"set {FIELD}=false, or model.moe.num_experts",
            )
        ]
    # Shapes must match.
    for new, old in upcycling.sources.items():
        if not _is_cut_of(given[old], wanted[new], new):
            return [
                _fault(
                    f"true: {old} is {given[old]}, {new} is {wanted[new]}",
                    "experts are the dense layer, or equal parts of it along its features",
                    "set model.moe.intermediate_size to the dense layer's, or to a whole part of it",
                )
            ]
    # An expert must be linear in its weight, and its biases whole.
    if moe.apply_probs_on_input:
        return [
            _fault(
                "true with model.moe.apply_probs_on_input=true",
                "experts that read less than the dense layer did are not that layer",
                f"set {FIELD}=false, or model.moe.apply_probs_on_input=false",
            )
        ]
    if parts > 1 and any(name.endswith(".bias") for name in upcycling.sources):
        return [
            _fault(
                f"true with experts of a {parts}th of the dense layer's features",
                "each of them would add the whole last bias",
                "set model.moe.intermediate_size to the dense layer's",
            )
        ]
    # Routing must be able to choose whole copies.
    rules = (
        (moe.num_experts, f"model.moe.num_experts={moe.num_experts}"),
        (moe.top_k, f"model.moe.top_k={moe.top_k}"),
        (moe.num_experts // moe.n_group, f"num_experts / n_group={moe.n_group}"),
    )
    return [
        _fault(
            f"true with {what}",
            f"{parts} experts are one copy of the dense layer, and all or none of a copy are chosen, so "
            f"{parts} must divide it (remainder {number % parts})",
            f"use a multiple of {parts}, or a larger model.moe.intermediate_size",
        )
        for number, what in rules
        if number % parts
    ]


def _granularity(dense: Shape, experts: Shape, name: str) -> int:
    dim = 1 if name.endswith(BACK) else 0
    return max(1, dense[dim] // experts[1 + dim])


def _is_cut_of(dense: Shape, experts: Shape, name: str) -> bool:
    """Return whether [F, D] is G times [F/G, D], or [D, F] that of [D, F/G]."""
    dim, parts = (1 if name.endswith(BACK) else 0), _granularity(dense, experts, name)
    part = list(experts[1:])
    part[dim] *= parts
    return dense == tuple(part)


def _fault(fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=f"{FIELD}={fact}", rule=rule, remedy=remedy)
