"""Cost of keyed dropout: nanoseconds per element, and its share of a training step.

python -m benchmarks.dropout [--seq-len S] [--batch B] [--width D] [--layers L] [--quick]
"""

import argparse
import time
from collections.abc import Callable

import torch

from raymega.config.schema import ModelSection
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.dropout import dropout, keep_mask, row_keys
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.stages import make_stages

RATE, ROUNDS = 0.1, 7
CPU = torch.device("cpu")


def best_s(work: Callable[[], object]) -> float:
    """The least CPU time of some rounds: other work on the machine only ever adds."""
    work()
    return min(cpu_s(work) for _ in range(ROUNDS))


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def show_element(seq_len: int, batch: int, width: int) -> None:
    samples = torch.arange(batch)
    # a key a token: the mask does not depend on which rank draws it
    keys = row_keys(1, samples, torch.arange(seq_len)[:, None])
    x = torch.randn(seq_len, batch, width)
    per_element = 1e9 / x.numel()
    works = {
        "keys of the tokens (once a micro-batch)": lambda: row_keys(
            1, samples, torch.arange(seq_len)[:, None]
        ),
        "mask": lambda: keep_mask(keys, width, rate=RATE),
        "keyed dropout, mask included": lambda: dropout(x, keys, rate=RATE),
        "torch's dropout": lambda: torch.nn.functional.dropout(x, RATE, training=True),
    }
    for name, work in works.items():
        print(f"{name:42}{best_s(work) * per_element:8.2f} ns an element")


def make_step(
    rates: dict[str, float], seq_len: int, batch: int, width: int, layers: int
) -> Callable[[], None]:
    """Forward and backward of one micro-batch through blocks, in fp32."""
    model = ModelSection(
        family="gpt2", num_layers=layers, hidden_size=width, num_heads=max(1, width // 64),
        ffn_hidden_size=4 * width, vocab_size=256, max_positions=seq_len, **rates,
    )  # fmt: skip
    # one rank without tensor parallelism
    alone = Group(name="tp", ranks=(0,), index=0, timeout_s=60, handle=None)
    _, stage, _ = make_stages((layers, layers, layers))
    module = StageModule(
        model,
        stage,
        sp=SequenceParallel(tp=alone),
        dtype=torch.float32,
        device=CPU,
        seed=1,
    )
    tokens, samples = torch.zeros(batch, seq_len, dtype=torch.int64), torch.arange(batch)
    hidden = torch.randn(seq_len, batch, width, requires_grad=True)

    def work() -> None:
        module(tokens, tokens, tokens, hidden, samples).sum().backward()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=256, help="S")
    parser.add_argument("--batch", type=int, default=4, help="B, sequences of a micro-batch")
    parser.add_argument("--width", type=int, default=512, help="D")
    parser.add_argument("--layers", type=int, default=2, help="blocks of a step")
    parser.add_argument("--quick", action="store_true", help="64 tokens, one sequence, D=128")
    given = parser.parse_args()
    if given.quick:
        given.seq_len, given.batch, given.width = 64, 1, 128
    seq_len, batch, width, layers = given.seq_len, given.batch, given.width, given.layers
    print(f"S={seq_len} B={batch} D={width}, fp32, {torch.get_num_threads()} threads")
    show_element(seq_len, batch, width)
    rates = {
        "no dropout": {},
        "residual dropout": {"hidden_dropout": RATE},
        "attention dropout too": {"hidden_dropout": RATE, "attention_dropout": RATE},
    }
    steps = {name: make_step(r, seq_len, batch, width, layers) for name, r in rates.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # variants in turn, so that a busy moment slows all of them
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(cpu_s(step))
    # the least of some rounds: other work on the machine only ever adds
    plain = min(times["no dropout"])
    for name, seconds in times.items():
        least = min(seconds)
        print(f"{layers} blocks, {name:22}{least * 1e3:9.1f} ms {least / plain - 1:+7.1%}")


if __name__ == "__main__":
    main()
