"""Planted mistakes, each of which silently trains another run on some layout.

A row replaces one piece of the package's text; what catches it is the comparison with one rank.
"""

from __future__ import annotations

from tests.mutations.base_blocks import BASE_BLOCKS
from tests.mutations.batches import BATCHES
from tests.mutations.distillation import DISTILLATION
from tests.mutations.encoders import ENCODERS
from tests.mutations.evaluations import EVALUATIONS
from tests.mutations.experts import EXPERTS
from tests.mutations.fp8 import FP8
from tests.mutations.heads import HEADS
from tests.mutations.images import IMAGES
from tests.mutations.kernels import KERNELS
from tests.mutations.layers import LAYERS
from tests.mutations.mutation import Mutation
from tests.mutations.preference import PREFERENCE
from tests.mutations.sharding import SHARDING
from tests.mutations.sums import SUMS
from tests.mutations.tuning import TUNING
from tests.mutations.two_streams import TWO_STREAMS
from tests.mutations.updates import UPDATES

KINDS: dict[str, tuple[Mutation, ...]] = {
    "sums": SUMS,
    "sharding": SHARDING,
    "layers": LAYERS,
    "kernels": KERNELS,
    "experts": EXPERTS,
    "batches": BATCHES,
    "updates": UPDATES,
    "fp8": FP8,
    "evaluations": EVALUATIONS,
    "tuning": TUNING,
    "base in blocks": BASE_BLOCKS,
    "encoders": ENCODERS,
    "two streams": TWO_STREAMS,
    "images": IMAGES,
    "preference": PREFERENCE,
    "heads": HEADS,
    "distillation": DISTILLATION,
}
MUTATIONS = tuple(row for rows in KINDS.values() for row in rows)
