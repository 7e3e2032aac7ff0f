"""Our tensor-parallel layers against DTensor's parallelize_module: one block, two gloo ranks.

Both run the same Llama block, forward and backward, cut the same way: q, k, v, gate and up by columns, out and
down by rows. The gradients of both are compared before the clock runs.

    python -m benchmarks.tensor_parallel [--quick] [--compile]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.measure import Sample, interleave, median, report, timed
from raymega.config.schema import ModelSection
from raymega.model.families import make_block, make_positions
from raymega.model.layers.fused_ops import rms_norm, swiglu
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Groups, build_groups
from raymega.parallel.comm.world import open_world
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.tensor_table import layer_tensors

RANKS = 2
# Width, heads, positions, sequences.
SHAPES = {"d64": (64, 2, 32, 4), "d256": (256, 8, 128, 1), "d256-b4": (256, 8, 128, 4)}
CPU = torch.device("cpu")


class PlainBlock(nn.Module):
    """The block as one writes it for one device: [B, S, D]."""

    def __init__(self, model: ModelSection, rope: nn.Module) -> None:
        super().__init__()
        self.rope, self.head_width = [rope], model.head_width  # a list hides it from the plan
        D, F = model.hidden_size, model.ffn_hidden_size
        self.norm1, self.norm2 = nn.RMSNorm(D, model.norm_eps), nn.RMSNorm(D, model.norm_eps)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_width)) for f in (self.q, self.k, self.v))
        rope = self.rope[0]
        q, k = (rope(t.transpose(0, 1)).transpose(0, 1) for t in (q, k))
        y = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


PLAN = {
    **dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}
OURS_OF = {
    "attention.q": "q", "attention.k": "k", "attention.v": "v", "attention.out": "out",
    "mlp.gate": "gate", "mlp.up": "up", "mlp.down": "down",
}  # fmt: skip


@cache
def _groups(rank: int) -> Groups:
    return build_groups(Grid(tp=RANKS), rank, timeout_s=60.0)


def make_ours(model: ModelSection, rank: int, *, is_fused: bool) -> nn.Module:
    # the same parameters as a run's block makes, on this rank's shard
    groups = _groups(rank)
    factory = ParameterFactory(
        table={tensor.name: tensor for tensor in layer_tensors(model, 0)},
        sp=SequenceParallel(tp=groups.tp, is_sequence_parallel=False),
        dtype=torch.float32,
        device=CPU,
        seed=1,
        is_fused=is_fused,
    )
    positions = make_positions(model, dtype=torch.float32, device=CPU, is_fused=is_fused)
    return make_block(factory, 0, model, positions)


def fill_from(plain: PlainBlock, ours: nn.Module) -> None:
    """Give our ranks their blocks of the whole weights, before DTensor cuts those."""
    for param in ours.parameters():
        assert isinstance(param, ShardedParameter)
        for piece in param.spec.pieces:
            name = piece.tensor.name.removeprefix("layers.0.").removesuffix(".weight")
            if name in OURS_OF:
                whole = getattr(plain, OURS_OF[name]).weight.data
                param.data[piece.place] = whole[piece.box.within(piece.tensor.whole)]


class Floor:
    """Lower bound: the operations that every tensor-parallel layer needs, on one rank's shards, and no others.

    Matrix products forward and backward, attention's kernel, and the four all-reduces of x. Beside it what
    the gate, the norms, the rotation and the residual sums take as our layers compute them.
    """

    def __init__(
        self, model: ModelSection, rank: int, batch: int, positions: int, *, is_fused: bool
    ) -> None:
        D, F, tokens = model.hidden_size, model.ffn_hidden_size, batch * positions
        sizes = ((D, 3 * D // RANKS), (D // RANKS, D), (D, 2 * F // RANKS), (F // RANKS, D))
        self.layers = [
            (torch.randn(tokens, n), torch.randn(m, n), torch.randn(tokens, m)) for n, m in sizes
        ]
        heads = (batch, model.num_heads // RANKS, positions, model.head_width)
        self.qkv = [torch.randn(heads).requires_grad_() for _ in range(3)]
        self.sp, self.tp = torch.zeros(tokens, D), _groups(rank).tp
        self.weight, self.is_fused = torch.ones(D, requires_grad=True), is_fused
        self.gate_up = torch.randn(tokens, 2 * F // RANKS).requires_grad_()
        self.x = torch.randn(tokens, D).requires_grad_()
        own_heads = heads[1]
        self.heads = torch.randn(positions, batch, 3 * own_heads, model.head_width).requires_grad_()
        self.sizes = own_heads, own_heads
        self.rope = make_positions(model, dtype=torch.float32, device=CPU, is_fused=is_fused)

    def products(self) -> None:
        # forward, the input's gradient, the weight's gradient
        for x, weight, grad in self.layers:
            torch.mm(x, weight.T)
            torch.mm(grad, weight)
            torch.mm(grad.T, x)

    def attention(self) -> None:
        y = scaled_dot_product_attention(*self.qkv, is_causal=True)
        torch.autograd.grad(y, self.qkv, y.detach())

    def all_reduces(self) -> None:
        for _ in range(4):
            all_reduce(self.sp, self.tp)

    def arithmetic(self) -> None:
        y = swiglu(self.gate_up, is_fused=self.is_fused)
        torch.autograd.grad(y, self.gate_up, y.detach())
        for _ in range(2):
            y = rms_norm(self.x, self.weight, 1e-5, is_fused=self.is_fused)
            (grad, _) = torch.autograd.grad(y, (self.x, self.weight), y.detach())
            # the residual sum, forward and backward
            torch.add(self.sp, self.sp)
            grad.add_(self.sp)
        parts = self.rope.split(self.heads, None, sizes=self.sizes)
        torch.autograd.grad(parts, self.heads, [part.detach() for part in parts])

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """CPU seconds by what was done."""
        works = (self.products, self.attention, self.all_reduces, self.arithmetic)
        return {work.__name__: [timed(work).cpu_s for _ in range(rounds)][2:] for work in works}


def measure(rank: int, results, *, folder: str, shape: str, rounds: int, is_compiled: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    open_world(
        rank=rank, world_size=RANKS, rendezvous="", store=store, timeout_s=60.0, device=CPU
    )  # fmt: skip
    width, heads, positions, batch = SHAPES[shape]
    model = ModelSection(
        family="llama", num_layers=1, hidden_size=width, num_heads=heads, ffn_hidden_size=4 * width,
        vocab_size=128, max_positions=positions,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = PlainBlock(model, make_positions(model, dtype=torch.float32, device=CPU))
    x = torch.randn(batch, positions, width)
    ours = make_ours(model, rank, is_fused=is_compiled)
    fill_from(plain, ours)
    theirs = parallelize_module(plain, init_device_mesh("cpu", (RANKS,)), PLAN)
    if is_compiled:
        theirs = torch.compile(theirs, dynamic=False)  # else it ends with an unhashable SymInt
    runs = [_runner(ours, x.transpose(0, 1).contiguous()), _runner(theirs, x)]
    # equal outputs and gradients before the clock runs
    (y_ours, grad_ours), (y_theirs, grad_theirs) = (run() for run in runs)
    for a, b in ((y_ours, y_theirs), (grad_ours, grad_theirs)):
        torch.testing.assert_close(a.transpose(0, 1), b, rtol=1e-4, atol=1e-4)
    pairs = interleave(*runs, rounds=rounds, warmup=4)
    floor = Floor(model, rank, batch, positions, is_fused=is_compiled).samples(rounds)
    results.put(([[(s.wall_s, s.cpu_s) for s in pair] for pair in pairs], floor))
    dist.barrier()
    dist.destroy_process_group()


def _runner(block: nn.Module, x: Tensor):
    leaf = x.clone().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        block.zero_grad(set_to_none=True)
        leaf.grad = None
        y = block(leaf)
        y.square().sum().backward()
        return y.detach(), leaf.grad

    return run


def compare(shape: str, rounds: int, *, is_compiled: bool) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    facts = {"shape": shape, "rounds": rounds, "is_compiled": is_compiled}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=measure, args=(rank, results), kwargs={"folder": folder, **facts}
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        rows = [results.get(timeout=600) for _ in ranks]
        for rank in ranks:
            rank.join()
    # A pair is over when the slower rank is; CPU seconds are those of both.
    pairs = [
        tuple(
            Sample(wall_s=max(wall for wall, _ in side), cpu_s=sum(cpu for _, cpu in side))
            for side in zip(*both, strict=True)
        )
        for both in zip(*(pairs for pairs, _ in rows), strict=True)
    ]
    row = report(
        f"block {shape} vs DTensor",
        pairs,
        shape=SHAPES[shape],
        ranks=RANKS,
        is_compiled=is_compiled,
    )
    _show_floor([floor for _, floor in rows], row["cpu_s"])


def _show_floor(floors, cpu_s) -> None:
    """Print the lower bound of a block's time, and the largest possible ratio of theirs over ours."""
    # CPU seconds of both ranks, as the pairs' are
    of_all = {name: sum(median(floor[name]).value for floor in floors) for name in floors[0]}
    arithmetic = of_all.pop("arithmetic")
    least = sum(of_all.values())
    parts = ", ".join(f"{name.replace('_', '-')} {1e3 * s:.2f}" for name, s in of_all.items())
    print(
        f"  floor: {parts}, together {1e3 * least:.2f} ms: {least / cpu_s['ours']:.0%} of ours; "
        f"theirs over it {cpu_s['theirs'] / least:.2f}, with the arithmetic between "
        f"({1e3 * arithmetic:.2f} ms) {cpu_s['theirs'] / (least + arithmetic):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small shape and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--only", default="", help="one shape: d256-b4")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="theirs through torch.compile, ours as with run.kernels=compile",
    )
    options = parser.parse_args()
    for shape in ("d64",) if options.quick else SHAPES:
        if options.only in ("", shape):
            rounds = options.rounds or (15 if options.quick else 61)
            compare(shape, rounds, is_compiled=options.compile)


if __name__ == "__main__":
    main()
