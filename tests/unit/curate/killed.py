"""Curates one corpus again and again in processes that are killed, each at a write drawn by a seed.

``python -m tests.unit.curate.killed CORPUS OUT NUMBER SEED`` prints what each output held after the death.
"""

import random
import sys
from functools import partial

from raymega.curate import pipeline
from raymega.prepare import groups
from tests.support.killed_writers import kill_at_writes
from tests.unit.curate.corpora import curated, in_this_process

WRITES = ("os.link", "os.rename", "os.remove")


def main(corpus, out, number, seed):
    for module, name, value in in_this_process():
        setattr(module, name, value)
    groups.MIN_GROUP_BYTES, pipeline.COMPARED_BYTES = 1 << 12, 20_000
    draw = random.Random(int(seed))

    def choose(num_writes):
        return sorted(draw.sample(range(num_writes), int(number)))

    kill_at_writes(partial(curated, corpus), out, events=WRITES, choose=choose)


if __name__ == "__main__":
    main(*sys.argv[1:])
