"""Bytes that autograd keeps for one block of one micro-batch, counted on real ranks, beside what is published.

    python -m benchmarks.activations [--seq-len S] [--batch B] [--width D] [--heads H] [--tp T] [--quick]

In units of S*B*D, bf16. The published formulas (Korthikanti et al. 2022, equations 1, 2 and 4, table 2) are
for GPT with residual and attention dropout and F = 4D; "published" is that of such a model, and a model
without such dropout, or with other layers, has none.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import torch

from raymega.config.schema import MemorySection, ModelSection
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.stages import make_stages
from tests.support.ranks import RankEnv, run_grid
from tests.support.saved_tensor_bytes import SavedBytes

MEMORIES = {
    "none": MemorySection(),
    "attention": MemorySection(recompute="selective"),
    "attention, activation, norm": MemorySection(
        recompute="selective", recompute_parts=("attention", "activation", "norm")
    ),
    "full": MemorySection(recompute="full"),
}
DROPPED = "gpt2, dropout, attention dropout"
MODELS = {
    "gpt2": {"family": "gpt2"},
    "gpt2, dropout": {"family": "gpt2", "hidden_dropout": 0.1},
    DROPPED: {"family": "gpt2", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {"family": "llama"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of one micro-batch and one block."""

    seq_len: int
    batch: int
    width: int
    heads: int

    @property
    def unit(self) -> int:
        """S * B * D."""
        return self.seq_len * self.batch * self.width

    def model(self, name: str) -> ModelSection:
        """The model of this name, three blocks deep."""
        return ModelSection(
            num_layers=3, hidden_size=self.width, num_heads=self.heads, ffn_hidden_size=4 * self.width,
            vocab_size=256, max_positions=self.seq_len, **MODELS[name],
        )  # fmt: skip


def published(recomputed: str, sizes: Sizes, tp: int, *, is_cut: bool) -> float | None:
    """Bytes over S*B*D that a block of a rank keeps; None for a recompute that the paper has not.

    Selective recompute there is of the attention core, whose output is kept.
    """
    # equations 1, 2 and 4 over S*B*D: what lies between the products, then the scores of attention
    between = 10 / (tp if is_cut else 1) + 24 / tp
    scores = 5 * sizes.heads * sizes.seq_len / (sizes.width * tp)
    by_name = {"none": between + scores, "attention": between, "full": 2 / (tp if is_cut else 1)}
    return by_name.get(recomputed)


def kept_bytes(env: RankEnv, sizes: Sizes, *, is_cut: bool) -> dict[tuple[str, str], int]:
    """Return the bytes that a middle block keeps for backward on this rank, by model and recompute."""
    sp = SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_cut)
    return {
        (name, recomputed): _kept(sizes.model(name), memory, sizes, sp)
        for name in MODELS
        for recomputed, memory in MEMORIES.items()
    }


def _kept(model: ModelSection, memory: MemorySection, sizes: Sizes, sp: SequenceParallel) -> int:
    # the middle of three blocks: no embedding, no head
    _, stage, _ = make_stages((1, 1, 1))
    cpu = torch.device("cpu")
    module = StageModule(model, stage, sp=sp, dtype=torch.bfloat16, device=cpu, seed=1)
    module.recompute(memory)
    tokens = torch.zeros(sizes.batch, sizes.seq_len, dtype=torch.int64)
    shape = sizes.seq_len // sp.degree, sizes.batch, model.hidden_size
    hidden = torch.randn(shape).bfloat16().requires_grad_()
    # parameters and buffers are state, not activations
    with SavedBytes([*module.parameters(), *module.buffers()]) as kept:
        module(tokens, tokens, tokens, hidden, torch.arange(sizes.batch))
    return kept.total


def show(sizes: Sizes, tp: int, *, is_cut: bool) -> None:
    """A row for each model and recompute; the most that a rank keeps, which all do."""
    ranks = run_grid(partial(kept_bytes, is_cut=is_cut), Grid(tp=tp), sizes, timeout=600)
    layout = f"tp{tp}{' + sp' if is_cut else ''}" if tp > 1 else "one rank"
    for name, recomputed in ranks[0]:
        # the rank that keeps most decides whether a layout fits
        kept = max(rank[name, recomputed] for rank in ranks)
        wanted = published(recomputed, sizes, tp, is_cut=is_cut) if name == DROPPED else None
        found = kept / sizes.unit
        beside = f"{wanted:11.2f}{found / wanted - 1:+9.2%}" if wanted else ""
        print(f"{layout:10}{name:34}{recomputed:29}{found:8.2f}{kept:12,}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=256, help="S")
    parser.add_argument("--batch", type=int, default=2, help="B, sequences of a micro-batch")
    parser.add_argument("--width", type=int, default=128, help="D")
    parser.add_argument("--heads", type=int, default=8, help="H")
    parser.add_argument("--tp", type=int, default=2, help="ranks that a block is cut over")
    parser.add_argument("--quick", action="store_true", help="64 tokens, one sequence")
    given = parser.parse_args()
    if given.quick:
        given.seq_len, given.batch = 64, 1
    sizes = Sizes(
        seq_len=given.seq_len, batch=given.batch, width=given.width, heads=given.heads
    )  # fmt: skip
    print(
        f"S={sizes.seq_len} B={sizes.batch} D={sizes.width} H={sizes.heads} F={4 * sizes.width}, bf16"
    )
    heads = f"{'layout':10}{'model':34}{'recomputed':29}{'sbh':>8}{'bytes':>12}"
    print(f"{heads}{'published':>11}{'off by':>9}")
    show(sizes, 1, is_cut=False)
    if given.tp > 1:
        show(sizes, given.tp, is_cut=False)
        show(sizes, given.tp, is_cut=True)


if __name__ == "__main__":
    main()
