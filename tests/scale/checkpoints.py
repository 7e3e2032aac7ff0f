"""Reports of the ranks of a large world about a save, as the writers send them, made from one stage's."""

from dataclasses import replace

import numpy as np

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.box_table import BoxTable, SavedTensor
from raymega.checkpoint.format.keys import data_file
from raymega.messages import ShardSaved
from raymega.plan.flat_boxes import boxes_of_range

KINDS = ("adam.exp_avg", "adam.exp_avg_sq", "model")
TP, PP, LAYERS = 8, 8, 10  # layers of a stage
SHAPES = {  # Llama 3 70B; the first dim is cut by tensor parallelism
    "attention.q.weight": (8192, 8192),
    "attention.k.weight": (1024, 8192),
    "attention.v.weight": (1024, 8192),
    "attention.o.weight": (8192, 8192),
    "mlp.gate.weight": (28672, 8192),
    "mlp.up.weight": (28672, 8192),
    "mlp.down.weight": (8192, 28672),
}
STATE = {"step": 100, "samples": 800}
HEADER_BYTES = 16_384


def shards_of(world_size):
    """Return one report a rank: optimizer state of 80 layers on tp8, pp8 and the rest data parallel."""
    dp = world_size // (TP * PP)
    first_stage = [
        BoxTable.of(tuple(_boxes(tp, replica, dp))) for replica in range(dp) for tp in range(TP)
    ]
    reports = []
    for stage in range(PP):
        for number, table in enumerate(first_stage):
            reports.append(_report(stage * len(first_stage) + number, table, stage))
    return reports


def shard_of(world_size, rank):
    """Return the report of one rank of :func:`shards_of`."""
    stage, number = divmod(rank, world_size // PP)
    replica, tp = divmod(number, TP)
    table = BoxTable.of(tuple(_boxes(tp, replica, world_size // (TP * PP))))
    return _report(rank, table, stage)


def _report(rank, table, stage):
    file = data_file(attempt=1, rank=rank)
    return ShardSaved(
        rank=rank, step=100, boxes=_moved(table, stage, file), state=STATE, stall_s=0.0,
        write_s=0.0, num_bytes=0, headers={file: rank},
    )  # fmt: skip


def rank_blocks(boxes):
    """Return the blocks of the rank whose saved boxes are given, by saved name."""
    blocks = {}
    for each in boxes:
        blocks.setdefault(each.tensor, []).append(each.box)
    return blocks


def _boxes(tp, replica, dp):
    """Yield the boxes of a rank of the first stage: its range of every tensor's part."""
    start = HEADER_BYTES
    for layer in range(LAYERS):
        for name, (rows, columns) in SHAPES.items():
            part = (rows // TP, columns)
            size = part[0] * part[1]
            ends = (size * replica // dp, size * (replica + 1) // dp)
            for kind in KINDS:
                for box in boxes_of_range(part, *ends):
                    placed = Box(
                        offset=(box.offset[0] + tp * part[0], box.offset[1]), shape=box.shape
                    )
                    yield SavedBox(
                        tensor=f"{kind}/layers.{layer}.{name}", dtype="float32",
                        global_shape=(rows, columns), box=placed, file="", start=start,
                        num_bytes=4 * box.num_elements, crc32=hash((start, tp, replica)) % 2**32,
                    )  # fmt: skip
                    start += 4 * box.num_elements


def _moved(table, stage, file):
    """Return the table of the same rank of another stage: other layers, another file, other checksums."""
    tensors = []
    for name, dtype, shape in table.tensors:
        kind, _, weight = name.partition("/")
        _, layer, *others = weight.split(".")
        weight = ".".join(["layers", str(int(layer) + stage * LAYERS), *others])
        tensors.append(SavedTensor(f"{kind}/{weight}", dtype, shape))
    rows = table.rows.copy()
    rows["crc32"] = rows["crc32"] * np.uint32(2654435761) + np.uint32(stage)
    return BoxTable(tensors, (file,), rows)


def with_error(shard):
    """Return a report whose last box is not there."""
    return replace(shard, boxes=shard.boxes[:-1])
