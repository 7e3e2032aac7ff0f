"""Layers of experts: grouped against looped, against transformers, and the ways of dispatch on 8 ranks.

    python -m benchmarks.moe [--only grouped|transformers|ranks] [--rounds N] [--quick] [--draw FILE]

Forward and backward in float32, one thread a process. Both sides of a pair run in turn, in a process as
it comes. Ours add their gradients to the sums that a run keeps (parallel.grad_buffer), the others leave
them in ``param.grad``, which is dropped after each step, as torch's own loops do.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks.measure import Sample, interleave, median, report, set_threads
from raymega.config.moe import MoeSection
from raymega.config.schema import ModelSection
from raymega.model.moe.experts import Experts
from raymega.model.moe.layer import MoeLayer
from raymega.model.moe.local_experts import run_local_experts
from raymega.parallel.comm.collectives import barrier
from raymega.parallel.comm.process_groups import alone, build_groups
from raymega.parallel.context_parallel.context import (
    Rows,
    TokenLayout,
    make_token_ids,
    make_token_layout,
    no_context,
)
from raymega.parallel.core.buckets import Sharing, make_buckets
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.tensor_table import layer_tensors
from tests.support.ranks import RankEnv, run_grid
from tests.support.references.moe import Factory, draw_weights

TOKENS_OF_EXPERT = (1, 4, 16, 64, 256)
WIDTHS = (64, 256, 1024)
NUM_EXPERTS = {64: 64, 256: 32, 1024: 8}
MICRO_BATCHES = 4
"""Micro-batches of a step beside transformers: what a run does once a step has the same weight in both."""


class Summed:
    """A module of ours, and the sums that its gradients are added to; a call is a step."""

    def __init__(
        self, module: torch.nn.Module, forward: Callable[[], Tensor], *, micro_batches: int = 1
    ) -> None:
        # one rank: gradients are added up, and nothing is exchanged
        params = [p for p in module.parameters() if isinstance(p, ShardedParameter)]
        nobody = Sharing(whole=alone(0), inside=alone(0), across=alone(0))
        table = make_buckets([params], nobody, experts=nobody)
        self.sums = GradBuffer(table, build_groups(Grid(), 0, timeout_s=60.0))
        self.forward, self.micro_batches = forward, micro_batches

    def __call__(self) -> None:
        """Forward and backward of each micro-batch."""
        self.sums.zero()
        for number in range(self.micro_batches):
            # the last backward may send what is full, as in a run
            if number == self.micro_batches - 1:
                self.sums.launch_when_full()
            self.forward().sum().backward()
            self.sums.launch()
        self.sums.finish()


def grouped_against_looped(*, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Experts on rows that lie by expert: the grouped products, and a loop over the experts."""
    rows = []
    for width in WIDTHS[: 2 if quick else None]:
        for tokens in TOKENS_OF_EXPERT[: 3 if quick else None]:
            for spread in sorted({0, tokens // 2}):
                rows.append(_pair_with_loop(width, tokens, spread, rounds))
    return rows


def _pair_with_loop(width: int, tokens: int, spread: int, rounds: int) -> dict[str, Any]:
    """Compare grouped experts with a loop; even experts get ``spread`` more tokens than the mean, odd ones fewer."""
    factory = _factory(
        MoeSection(num_experts=NUM_EXPERTS[width]), width=width, ffn_hidden_size=width
    )
    experts = Experts(factory, "layers.0.moe.experts")
    counts = torch.full((NUM_EXPERTS[width],), tokens)
    # even experts more, odd ones fewer: the sum stays, and products of several sizes come
    counts[::2] += spread
    counts[1::2] -= spread
    x = torch.randn(int(counts.sum()), width, requires_grad=True)
    looped = _Looped(experts)
    with torch.no_grad():
        # equal results before the clock runs
        assert torch.allclose(experts(x, counts), looped(x, counts), rtol=1e-3, atol=1e-4)
    pairs = interleave(
        Summed(experts, lambda: experts(x, counts)),
        lambda: _step(lambda: looped(x, counts), looped),
        rounds=rounds if tokens * width < 1 << 16 else max(7, rounds // 3),
    )
    uneven = f" +- {spread}" if spread else ""
    name = f"{NUM_EXPERTS[width]} experts of width {width}, {tokens}{uneven} tokens each"
    return report(name, pairs, width=width, tokens=tokens, spread=spread)


def _factory(moe: MoeSection, *, width: int, ffn_hidden_size: int) -> ParameterFactory:
    """Return the parameters of one block, initialised with standard deviation width**-0.5."""
    model = ModelSection(
        family="llama", num_layers=1, hidden_size=width, num_heads=4, ffn_hidden_size=ffn_hidden_size, vocab_size=64,
        max_positions=8, moe=moe, initializer_range=width**-0.5,
    )  # fmt: skip
    return ParameterFactory(
        table={tensor.name: tensor for tensor in layer_tensors(model, 0)},
        sp=SequenceParallel(tp=alone(0)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=1,
    )


class _Looped(torch.nn.Module):
    """Experts as a list of modules: one after the other, each on its rows with weights of its own."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        gate_up, down = experts.up.detach(), experts.down.detach()
        self.parts = torch.nn.ModuleList(
            torch.nn.ParameterList(part.clone() for part in (*pair.chunk(2), back))
            for pair, back in zip(gate_up, down, strict=True)
        )

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: [R, D] by expert."""
        outputs = []
        for (gate, up, down), rows in zip(self.parts, x.split(counts.tolist()), strict=True):
            outputs.append(linear(silu(linear(rows, gate)) * linear(rows, up), down))
        return torch.cat(outputs)


def _step(
    forward: Callable[[], Tensor], module: torch.nn.Module, *, micro_batches: int = 1
) -> None:
    for _ in range(micro_batches):
        forward().sum().backward()
    module.zero_grad()


def against_transformers(*, rounds: int, quick: bool) -> None:
    """A whole layer and Mixtral's block with each way that transformers has for the experts.

    A step has some micro-batches, whose gradients both sides add up.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    shapes = ((64, 16, 256), (256, 16, 512), (512, 8, 256))[: 1 if quick else None]
    for width, num_experts, tokens in shapes:
        nobody, sp = alone(0), SequenceParallel(tp=alone(0))
        groups = ExpertGroups(ep=nobody, etp=nobody, micro=nobody, sp=sp)
        moe = MoeSection(num_experts=num_experts)
        factory = _factory(moe, width=width, ffn_hidden_size=2 * width)
        layer = MoeLayer(factory, "layers.0.moe", moe, groups)
        x, places = torch.randn(tokens, 1, width, requires_grad=True), _whole_places(tokens)
        ours = Summed(layer, lambda: layer(x, places), micro_batches=MICRO_BATCHES)  # noqa: B023
        for way in ("grouped_mm", "batched_mm", "eager"):
            config = MixtralConfig(
                hidden_size=width, intermediate_size=2 * width, num_local_experts=num_experts,
                num_experts_per_tok=2, num_hidden_layers=1,
            )  # fmt: skip
            # the switch that from_pretrained's option sets
            config._experts_implementation = way
            block = MixtralSparseMoeBlock(config)
            _fill(block, layer)
            their_x = x.transpose(0, 1)
            with torch.no_grad():
                found = _output(block(their_x)), layer(x, places).transpose(0, 1)
            assert torch.allclose(*found, rtol=1e-3, atol=1e-4)
            pairs = interleave(
                ours,
                lambda: _step(
                    lambda: _output(block(their_x)),  # noqa: B023
                    block,  # noqa: B023
                    micro_batches=MICRO_BATCHES,
                ),
                rounds=rounds if way != "batched_mm" else 3,
            )
            name = f"{num_experts} experts, width {width}, {tokens} tokens: {way}"
            report(name, pairs)
            if way != "batched_mm":
                pairs = interleave(*_experts_alone(ours, layer, block, x, places), rounds=rounds)
                report(f"{name}, no router", pairs)


def _experts_alone(
    extra_reductions: Summed,
    layer: MoeLayer,
    block: torch.nn.Module,
    x: Tensor,
    places: TokenLayout,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return both implementations from routed tokens to weighted sums, for the same routing."""
    tokens = x.detach().flatten(0, 1).requires_grad_()
    with torch.no_grad():
        # route once: both sides get the same experts and weights
        routing = layer.router(tokens, places.token_ids)[1]
    routing = replace(routing, weights=routing.weights.clone().requires_grad_())
    ours = copy(extra_reductions)
    ours.forward = lambda: run_local_experts(tokens, routing, layer.experts)

    def theirs() -> Tensor:
        return block.experts(tokens, routing.experts, routing.weights)

    with torch.no_grad():
        assert torch.allclose(ours.forward(), theirs(), rtol=1e-3, atol=1e-4)
    return ours, lambda: _step(theirs, block, micro_batches=MICRO_BATCHES)


def _whole_places(tokens: int) -> TokenLayout:
    """Return the token layout that a stage builds once per micro-batch."""
    rows, context = Rows(torch.arange(tokens)[None], ((tokens,),)), no_context()
    token_ids = make_token_ids(rows, torch.ones(1, tokens), context, SequenceParallel(tp=alone(0)))
    return replace(make_token_layout(rows, context), token_ids=token_ids)


def _output(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


@torch.no_grad()
def _fill(block: torch.nn.Module, layer: MoeLayer) -> None:
    block.gate.weight.copy_(layer.router.weight)
    block.experts.gate_up_proj.copy_(layer.experts.up)
    block.experts.down_proj.copy_(layer.experts.down)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Variant of running the same layer on 8 ranks."""

    is_gathered: bool
    moe: dict[str, Any]


VARIANTS = {
    "all_to_all, dropless": Variant(is_gathered=False, moe={}),
    "all_gather, dropless": Variant(is_gathered=True, moe={}),
    "all_to_all, capacity 1": Variant(is_gathered=False, moe={"capacity_factor": 1.0}),
    "all_gather, capacity 1": Variant(is_gathered=True, moe={"capacity_factor": 1.0}),
    "all_to_all, padded to capacity 1": Variant(
        is_gathered=False, moe={"capacity_factor": 1.0, "pad_expert_input_to_capacity": True}
    ),
}
MAPPINGS = {
    "experts as attention: tp2 dp4, etp2 ep4": Grid(tp=2, dp=4, etp=2, ep=4),
    "folded: tp2 dp4, etp1 ep8": Grid(tp=2, dp=4, ep=8),
    "folded: tp2 dp4, etp1 ep2 edp4": Grid(tp=2, dp=4, ep=2),
    "whole experts everywhere: tp2 dp4, etp1 ep1": Grid(tp=2, dp=4),
}
RANK_MOE = {"num_experts": 16, "top_k": 2}
RANK_WIDTH, RANK_FFN, RANK_TOKENS = 256, 512, 512


def on_ranks(*, rounds: int, quick: bool) -> None:
    """Tokens a second of 8 ranks by mapping, dispatch and drops; every variant in each round."""
    names = list(VARIANTS)
    for mapping, grid in MAPPINGS.items():
        ranks = run_grid(_time_variants, grid, 3 if quick else rounds, timeout=600)
        for name in names:
            # a round is over when the slowest rank is; CPU seconds are those of all
            walls = [max(r[name][i].wall_s for r in ranks) for i in range(len(ranks[0][name]))]
            cpus = [sum(r[name][i].cpu_s for r in ranks) for i in range(len(ranks[0][name]))]
            tokens = RANK_TOKENS * grid.dp
            row = {
                "mapping": mapping, "variant": name, "load": os.getloadavg()[0],
                "tokens_per_s": tokens / median(walls).value,
                "tokens_per_cpu_s": tokens / median(cpus).value, "rounds": len(walls),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


def _time_variants(env: RankEnv, rounds: int) -> dict[str, list[Sample]]:
    calls = {name: _rank_step(env, variant) for name, variant in VARIANTS.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            barrier(env.groups.world)
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            sample = Sample(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
            if number:
                samples[name].append(sample)
    return samples


def _rank_step(env: RankEnv, variant: Variant) -> Callable[[], None]:
    groups, here = env.groups, env.grid.expert_coords(env.rank)
    moe = MoeSection(**{**RANK_MOE, **variant.moe})
    weights = draw_weights(moe, width=RANK_WIDTH, ffn_hidden_size=RANK_FFN)
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=True)
    factory = Factory(
        weights, sp, ep=(groups.ep.size, here.ep), etp=(groups.etp.size, here.etp),
        dtype=torch.float32,
    )  # fmt: skip
    ranks = ExpertGroups(
        ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp,
        is_gathered=variant.is_gathered,
    )  # fmt: skip
    layer = MoeLayer(factory, "moe", moe, ranks)  # a factory's stand-in
    x = torch.randn(RANK_TOKENS // groups.tp.size, 1, RANK_WIDTH, requires_grad=True)
    places = _places(env)
    return lambda: _step(lambda: layer(x, places), layer)


def _places(env: RankEnv) -> Any:
    rows = Rows(torch.arange(RANK_TOKENS)[None], ((RANK_TOKENS,),))
    context, sp = (
        no_context(env.rank),
        SequenceParallel(tp=env.groups.tp, is_sequence_parallel=True),
    )
    token_ids = make_token_ids(rows, torch.ones(1, RANK_TOKENS), context, sp)
    return replace(make_token_layout(rows, context), token_ids=token_ids)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed of grouped over looped by tokens of an expert, a line a width."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "raymega"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for width in sorted({row["width"] for row in rows}):
        # only even loads: a curve has one point for each number of tokens
        own = [row for row in rows if row["width"] == width and not row["spread"]]
        xs = [row["tokens"] for row in own]
        ratios = [row["cpu_s"]["ratio"] for row in own]
        errors = [
            [row["cpu_s"]["ratio"] - row["cpu_s"]["low"] for row in own],
            [row["cpu_s"]["high"] - row["cpu_s"]["ratio"] for row in own],
        ]
        label = f"{NUM_EXPERTS[width]} experts of width {width}"
        axes.errorbar(xs, ratios, yerr=errors, marker="o", capsize=3, label=label)
    axes.axhline(1.0, color="#8a8f98", linewidth=1.0)
    axes.set_xscale("log", base=4)
    axes.set_xticks(TOKENS_OF_EXPERT, [str(tokens) for tokens in TOKENS_OF_EXPERT])
    axes.set_xlabel("tokens of an expert")
    axes.set_ylabel("CPU time of a loop over grouped")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("grouped", "transformers", "ranks"))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    set_threads(1)
    torch.manual_seed(0)
    if args.only in (None, "grouped"):
        rows = grouped_against_looped(rounds=args.rounds, quick=args.quick)
        if args.draw is not None:
            draw(rows, args.draw)
    if args.only in (None, "transformers"):
        against_transformers(rounds=args.rounds, quick=args.quick)
    if args.only in (None, "ranks"):
        on_ranks(rounds=args.rounds, quick=args.quick)


if __name__ == "__main__":
    main()
