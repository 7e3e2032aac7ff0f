"""Children that are killed at a write: what a program leaves behind at each moment that its files get their names."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def kill_at_writes(
    write: Callable[[str], object],
    out: str,
    *,
    events: Sequence[str],
    choose: Callable[[int], Iterable[int]],
) -> None:
    """Run a program in forked children, each killed at another write, and print what each left as a JSON line.

    Args:
        write: The program, which writes into the folder that it gets. The caller has no threads, so that forks are safe.
        out: Start of the folders' names.
        events: Events of Python's audit that count as writes.
        choose: Numbers of the writes at which a child is killed, in order, from how many there are.
    """
    # One that lives tells how many writes there are.
    count = Path(f"{out}.count")
    _run_child(write, f"{out}-all", sys.maxsize, events, count)
    for number in choose(int(count.read_text())):
        place = f"{out}-{number}"
        died_by = _run_child(write, place, number, events, count)
        left = sorted(path.name for path in Path(place).glob("*"))
        print(json.dumps({"out": place, "signal": died_by, "left": left}))


def _run_child(write, out, number, events, count):
    pid = os.fork()
    if not pid:
        seen = _die_at(number, events)
        write(out)
        count.write_text(str(len(seen)))
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def _die_at(number, events):
    seen = []

    def watch(event, _):
        if event in events:
            seen.append(event)
            if len(seen) > number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen
