"""Prepares one corpus again and again in processes that are killed, each at its own write.

``python -m tests.unit.prepare.killed CORPUS OUT STEP`` kills a child at every STEP-th write, and at each of the last
ones, which commit the dataset. It prints what each output held after the death. Children run tasks themselves, without
Ray.
"""

import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from raymega.prepare import assembly, groups, pipeline
from tests.unit.prepare.corpora import prepared

# Events of Python's audit by which files get their names, and by which _state is removed.
WRITES = ("os.rename", "shutil.rmtree")


def main(corpus, out, step):
    groups.MIN_GROUP_BYTES, assembly.SHARD_TOKENS = 1 << 12, 1 << 14
    pipeline._on_cluster = lambda items, run: map(run, items)
    pipeline.session_at = lambda _: nullcontext()
    # One that lives tells how many writes there are.
    count = Path(f"{out}.count")
    _run_child(corpus, f"{out}-all", sys.maxsize, count)
    num_writes = int(count.read_text())
    for number in sorted({*range(0, num_writes, int(step)), *range(num_writes - 6, num_writes)}):
        place = f"{out}-{number}"
        died_by = _run_child(corpus, place, number, count)
        print(json.dumps({"out": place, "signal": died_by, "left": _names(place)}))


def _run_child(corpus, out, number, count):
    # The parent has no threads, so that a fork is safe.
    pid = os.fork()
    if not pid:
        seen = _die_at(number)
        prepared(corpus, out)
        count.write_text(str(len(seen)))
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def _die_at(number):
    seen = []

    def watch(event, _):
        if event in WRITES:
            seen.append(event)
            if len(seen) > number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen


def _names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


if __name__ == "__main__":
    main(*sys.argv[1:])
