"""Pipelined steps against torch.distributed.pipelining: the same stages, four gloo ranks, one after the other.

Stages are residual feed-forward layers with the same weights and the same code, except in schedules that split the
backward: torch splits its own linear, ours use raymega's, which delays the weight gradient, with a run's gradient
buffer. Losses and gradients of both are compared before the clock runs. Then come steps in interleaved pairs, then one step of each that is recorded (bubble) and
one whose tensors are counted (peak). Two cores hide idle time: one rank's wait is another's work. So a second
part, pipeline_bubbles, takes sleeps for work and measures bubbles only.

    python -m benchmarks.pipelines [--quick] [--only speed|bubbles] [--rounds N] [--draw docs/img/pipeline-bubbles.svg]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.nn.functional import gelu

from benchmarks import pipeline_bubbles
from benchmarks.live_bytes import LiveBytes
from benchmarks.measure import Sample, interleave, report
from raymega.parallel.comm.process_groups import Groups, build_groups
from raymega.parallel.comm.world import open_world
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.tensor_parallel.linear import column_linear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.pipeline.executor import Executor, StepOutput
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.grid import Grid
from raymega.schedule.order import Sizes
from raymega.schedule.recording import Recording
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_schedule
from raymega.schedule.timeline import Event, bubble
from tests.support.params import make_table, make_tensor

RANKS = 4
CUT_IN_TWO = ("zb_v", "dualpipe_v")
"""Schedules whose backward comes in two parts, for which ours need a linear layer of their own."""
CPU = torch.device("cpu")
TIMEOUT_S = 120.0
# Our name, chunks a rank, torch's class.
SCHEDULES = {
    "gpipe": (1, pipelining.ScheduleGPipe),
    "1f1b": (1, pipelining.Schedule1F1B),
    "interleaved": (2, pipelining.ScheduleInterleaved1F1B),
    "zb_v": (2, ScheduleZBVZeroBubble),
    "dualpipe_v": (2, ScheduleDualPipeV),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers a rank, width, positions, sequences of a micro-batch, micro-batches."""

    layers: int
    width: int
    positions: int
    batch: int
    num_micro_batches: int


SHAPES = {
    "small": Shape(layers=4, width=64, positions=32, batch=2, num_micro_batches=8),
    "large": Shape(layers=4, width=256, positions=128, batch=1, num_micro_batches=16),
}


class Layer(nn.Module):
    """x + W2 gelu(W1 norm(x)); who multiplies by W1 and W2 is handed in."""

    def __init__(self, width: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 4 * width) / (4 * width) ** 0.5)
        self._multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        return x + self._multiply(gelu(self._multiply(self.norm(x), self.up)), self.down)


def make_stage(
    stage: int, shape: Shape, chunks: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> nn.Module:
    """The same weights whoever asks; gradients are there from the start and add up."""
    # by stage and not by rank: both sides draw the same weights wherever a stage lies
    torch.manual_seed(stage)
    module = nn.Sequential(*(Layer(shape.width, multiply) for _ in range(shape.layers // chunks)))
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    return module


def shard(modules: list[nn.Module], groups: Groups) -> GradBuffer:
    """Make the matrices of these stages a run's parameters, and the buffer of their gradients."""
    chunks: list[list[ShardedParameter]] = []
    for module in modules:
        chunks.append([])
        for number, layer in enumerate(module.children()):
            for name in ("up", "down"):
                values = getattr(layer, name).detach()
                spec = make_spec((make_tensor(f"{number}.{name}", values.shape),), tp=1, tp_rank=0)
                setattr(layer, name, ShardedParameter(values, spec))
                chunks[-1].append(getattr(layer, name))
    return GradBuffer(make_table(chunks, groups), groups)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Side:
    """Stages of one rank and their runtime; ``step`` returns the loss of the last stage, else 0.

    ``zero`` clears the gradients that ``step`` accumulates.
    """

    modules: list[nn.Module]
    step: Callable[[], float]
    zero: Callable[[], None]
    gradient: Callable[[nn.Parameter], Tensor]
    record: Callable[[], list[Event]]
    standing_bytes: Callable[[], int]


def make_ours(
    name: str,
    shape: Shape,
    groups: Groups,
    chunks: int,
    batches: list[Tensor],
    targets: list[Tensor],
) -> Side:
    rank = groups.pp_forward.index
    program = make_schedule(
        name, Sizes(pp=RANKS, num_micro_batches=shape.num_micro_batches, chunks=chunks)
    )
    placement = program.placement
    stages = [placement.stage(rank, chunk) for chunk in range(chunks)]
    deferrals = [WeightGradQueue() for _ in stages]
    sp = SequenceParallel(tp=groups.tp)

    def multiply(x: Tensor, weight: Tensor, *, grad_queue: WeightGradQueue) -> Tensor:
        # whole backwards: the same linear as torch's side
        if name not in CUT_IN_TWO:
            return nn.functional.linear(x, weight)
        return column_linear(x, weight, None, sp, grad_queue)

    side = Side()
    side.modules = [
        make_stage(stage, shape, chunks, partial(multiply, grad_queue=grad_queue))
        for stage, grad_queue in zip(stages, deferrals, strict=True)
    ]
    p2p = PointToPoint(
        groups, placement=placement, shape=tuple(batches[0].shape), dtype=torch.float32, device=CPU,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip

    def stage_fn(
        micro_batch: int, hidden: Tensor | None, *, stage: int, module: nn.Module
    ) -> Tensor:
        output = module(batches[micro_batch] if hidden is None else hidden)
        is_last = stage == placement.num_stages - 1
        return loss_of(output, targets[micro_batch]) if is_last else output

    fns = [
        partial(stage_fn, stage=stage, module=module)
        for stage, module in zip(stages, side.modules, strict=True)
    ]
    # one list of operations a rank, as a run has it
    executor = Executor(program.lists[rank], fns, p2p, deferrals=deferrals)
    gradients = shard(side.modules, groups) if name in CUT_IN_TWO else None

    def run(*, is_recording: bool) -> StepOutput:
        micro_batches = range(shape.num_micro_batches)
        if gradients is None:
            return executor.run(micro_batches, is_recording=is_recording)
        # a run's gradient buffer: cleared, launched with the last backward, waited for
        gradients.zero()
        output = executor.run(
            micro_batches,
            is_recording=is_recording,
            before_last_backward=gradients.launch_when_full,
            after_backward=gradients.launch,
        )
        gradients.finish()
        return output

    def gradient(param: nn.Parameter) -> Tensor:
        return gradients.view(param) if isinstance(param, ShardedParameter) else param.grad

    side.step = lambda: float(run(is_recording=False).loss_sum)
    side.record = lambda: list(run(is_recording=True).events)
    side.zero, side.gradient = partial(_zero, side.modules), gradient
    side.standing_bytes = lambda: 0
    return side


def make_theirs(
    name: str,
    shape: Shape,
    rank: int,
    placement: Placement,
    batches: list[Tensor],
    targets: list[Tensor],
) -> Side:
    chunks, kind = SCHEDULES[name]
    indices = [placement.stage(rank, chunk) for chunk in range(chunks)]
    side = Side()
    side.modules = [make_stage(index, shape, chunks, nn.functional.linear) for index in indices]
    stages = [
        pipelining.PipelineStage(module, index, placement.num_stages, CPU)
        for index, module in zip(indices, side.modules, strict=True)
    ]
    # torch's schedules of one chunk take the stage itself, the others a list
    held = stages if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else stages[0]
    schedule = kind(held, shape.num_micro_batches, loss_fn=loss_of, scale_grads=False)
    x, y = torch.cat(batches), torch.cat(targets)
    # only the rank with the last stage gets targets and losses
    has_loss = placement.num_stages - 1 in indices

    def step() -> float:
        losses: list[Tensor] = []
        first = (x,) if 0 in indices else ()
        schedule.step(
            *first,
            target=y if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if has_loss else 0.0

    def record() -> list[Event]:
        events: list[Event] = []
        # wraps the stages for good, which is why recording comes last
        for chunk, stage in enumerate(stages):
            _watch(stage, chunk, events)
        step()
        return events

    side.step, side.record = step, record
    side.zero, side.gradient = partial(_zero, side.modules), lambda param: param.grad
    side.standing_bytes = lambda: sum(map(_buffer_bytes, stages))
    return side


def _watch(stage: pipelining.PipelineStage, chunk: int, events: list[Event]) -> None:
    """Note when torch's stage works; what lies between is waiting, transfers and torch itself."""

    def watched(name: str, call: Callable) -> Callable:
        def timed(micro_batch: int, *args: object, **options: object) -> object:
            began = time.perf_counter()
            result = call(micro_batch, *args, **options)
            is_half = name == "backward" and options.get("full_backward") is False
            op = "backward_input" if is_half else name
            events.append(Event(op, micro_batch, chunk, began, time.perf_counter()))
            return result

        return timed

    stage.forward_one_chunk = watched("forward", stage.forward_one_chunk)
    stage.backward_one_chunk = watched("backward", stage.backward_one_chunk)
    stage.backward_weight_one_chunk = watched("backward_weight", stage.backward_weight_one_chunk)


def _buffer_bytes(stage: pipelining.PipelineStage) -> int:
    """Return the bytes of torch's receive buffers, over all micro-batches of a step."""
    infos = [
        info
        for table in (stage.args_recv_info, stage.grad_recv_info)
        for group in table.values()
        for info in group
    ]
    return sum(i.buffer.nbytes for i in infos if i is not None and i.buffer is not None)


def _zero(modules: list[nn.Module]) -> None:
    for module in modules:
        module.zero_grad(set_to_none=False)


def _peak_bytes(side: Side) -> int:
    with LiveBytes() as live:
        side.step()
    return live.peak + side.standing_bytes()


def _compare_results(ours: Side, theirs: Side) -> float:
    """The loss of both, equal, and equal gradients of every stage."""
    losses = []
    for side in (ours, theirs):
        side.zero()
        losses.append(side.step())
    # ranks without the last stage add zero
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    torch.testing.assert_close(total[0], total[1], rtol=1e-6, atol=0)
    for mine, other in zip(ours.modules, theirs.modules, strict=True):
        for params in zip(mine.parameters(), other.parameters(), strict=True):
            a, b = (s.gradient(p) for s, p in zip((ours, theirs), params, strict=True))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    return float(total[0])


def measure(rank: int, folder: str, name: str, shape: Shape, rounds: int, results) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    open_world(
        rank=rank, world_size=RANKS, rendezvous="", store=store, timeout_s=TIMEOUT_S, device=CPU
    )  # fmt: skip
    groups = build_groups(Grid(pp=RANKS), rank, timeout_s=TIMEOUT_S)
    torch.manual_seed(1000)
    size = (shape.batch, shape.positions, shape.width)
    batches, targets = (
        [torch.randn(size) for _ in range(shape.num_micro_batches)] for _ in range(2)
    )
    chunks, _ = SCHEDULES[name]
    program = make_schedule(
        name, Sizes(pp=RANKS, num_micro_batches=shape.num_micro_batches, chunks=chunks)
    )
    ours = make_ours(name, shape, groups, chunks, batches, targets)
    theirs = make_theirs(name, shape, rank, program.placement, batches, targets)
    theirs.step()  # torch works out its shapes in the first, with an extra forward and backward
    loss = _compare_results(ours, theirs)

    def together(step: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            step()

        return run

    pairs = interleave(together(ours.step), together(theirs.step), rounds=rounds)
    rows, peaks = [], []
    for side in (ours, theirs):
        dist.barrier()
        # count tensors in a step of its own: the counter slows every operation
        peaks.append(_peak_bytes(side))
        dist.barrier()
        rows.append(side.record())
    samples = [[(s.wall_s, s.cpu_s) for s in pair] for pair in pairs]
    results.put((rank, (samples, rows, peaks, loss)))
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str, shape_name: str, rounds: int) -> float:
    """Measure one schedule and return torch's wall time over ours."""
    shape = SHAPES[shape_name]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, folder, name, shape, rounds, results))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=1200) for _ in ranks)
        for rank in ranks:
            rank.join()
    samples, rows, peaks, losses = zip(*(found[rank] for rank in range(RANKS)), strict=True)
    # A step is over when the slowest rank is; CPU seconds are those of all.
    pairs = [
        tuple(
            Sample(wall_s=max(wall for wall, _ in side), cpu_s=sum(cpu for _, cpu in side))
            for side in zip(*both, strict=True)
        )
        for both in zip(*samples, strict=True)
    ]
    chunks, _ = SCHEDULES[name]
    sizes = Sizes(pp=RANKS, num_micro_batches=shape.num_micro_batches, chunks=chunks)
    recording = Recording(
        rows=dict(enumerate(mine for mine, _ in rows)),
        pipelines=(tuple(range(RANKS)),),
        placement=make_schedule(name, sizes).placement,
    )
    facts = {
        "loss": losses[0],
        "bubble": {"ours": bubble([mine for mine, _ in rows]).ratio,
                   "theirs": bubble([theirs for _, theirs in rows]).ratio,
                   "simulated": recording.simulated().bubble},
        "peak_bytes": {"ours": max(mine for mine, _ in peaks), "theirs": max(t for _, t in peaks)},
    }  # fmt: skip
    print(
        f"{name}, {shape_name}: loss {losses[0]:.6g} of both; bubble "
        + ", ".join(f"{who} {value:.2f}" for who, value in facts["bubble"].items())
        + "; peak MiB "
        + ", ".join(f"{who} {value / 2**20:.2f}" for who, value in facts["peak_bytes"].items())
    )
    row = report(f"{name} {shape_name}", pairs, ranks=RANKS, **facts)
    return row["wall_s"]["ratio"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small shape and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--only", choices=("speed", "bubbles"), default="")
    parser.add_argument("--schedule", choices=SCHEDULES, default="")
    parser.add_argument("--draw", type=Path, help="write the picture of the second part here")
    options = parser.parse_args()
    rounds = options.rounds or (7 if options.quick else 31)
    names = (options.schedule,) if options.schedule else tuple(SCHEDULES)
    if options.only != "bubbles":
        ratios = {
            (name, shape): compare(name, shape, rounds)
            for shape in (("small",) if options.quick else SHAPES)
            for name in names
        }
        worst = min(ratios, key=ratios.get)
        print(f"slowest beside torch: {' '.join(worst)}, theirs / ours {ratios[worst]:.3f}")
    if options.only != "speed":
        is_within = pipeline_bubbles.run(is_quick=options.quick, picture=options.draw)
        sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
