"""Prepares one corpus again and again in processes that are killed, each at its own write.

``python -m tests.unit.prepare.killed CORPUS OUT STEP`` kills a child at every STEP-th write, and at each of the last
ones, which commit the dataset. It prints what each output held after the death. Children run tasks themselves, without
Ray.
"""

import sys
from contextlib import nullcontext
from functools import partial

from raymega.prepare import assembly, groups, pipeline
from tests.support.killed_writers import kill_at_writes
from tests.unit.prepare.corpora import prepared

# By which files get their names, and by which _state is removed.
WRITES = ("os.rename", "shutil.rmtree")


def main(corpus, out, step):
    groups.MIN_GROUP_BYTES, assembly.SHARD_TOKENS = 1 << 12, 1 << 14
    pipeline.on_cluster = lambda items, run: map(run, items)
    pipeline.session_at = lambda _: nullcontext()

    def choose(num_writes):
        return sorted({*range(0, num_writes, int(step)), *range(num_writes - 6, num_writes)})

    kill_at_writes(partial(prepared, corpus), out, events=WRITES, choose=choose)


if __name__ == "__main__":
    main(*sys.argv[1:])
