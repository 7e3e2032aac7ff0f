"""Time of initial weights: CPU ns an element on one thread, of a whole tensor and of its rows and columns.

python -m benchmarks.initial_weights [--width 8192] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch

from raymega.box import Box
from raymega.parallel.core.shard_spec import Piece, ShardSpec
from raymega.parallel.core.sharded_parameter import ShardedParameter, initialise
from raymega.plan.layers.global_tensor import GlobalTensor


def seconds(tensor: GlobalTensor, box: Box, rounds: int) -> float:
    """Return the least CPU seconds of drawing a float32 parameter that is one block of ``tensor``."""
    local = Box.whole(box.shape)
    piece = Piece(tensor=tensor, box=box, local=local, is_primary=True, is_partial_over_tp=False)
    param = ShardedParameter(torch.zeros(box.shape), ShardSpec(pieces=(piece,), is_tied=False))
    taken = []
    for seed in range(rounds):
        begun_s = time.process_time()
        initialise(param, seed)
        taken.append(time.process_time() - begun_s)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = options.width
    tensor = GlobalTensor(
        name="layers.0.mlp.up.weight", shape=(width, width), tp_dim=0, init="normal",
        initializer_range=0.02, role="matrix",
    )  # fmt: skip
    boxes = {"whole": Box.whole(tensor.shape)}
    for tp in (2, 8):
        boxes[f"rows, tp {tp}"] = Box(offset=(width // tp, 0), shape=(width // tp, width))
        boxes[f"columns, tp {tp}"] = Box(offset=(0, width // tp), shape=(width, width // tp))
    for name, box in boxes.items():
        taken_s = seconds(tensor, box, options.rounds)
        print(f"{name:14} {taken_s / box.num_elements * 1e9:5.1f} ns an element")
    print(f"load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
