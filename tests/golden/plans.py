"""`raymega plan --json` of every job file, as it is and on H100s, and of the table of published runs.

What is printed is kept as its sha256, all of it but the ranks as it stands, and the kinds of ranks by what
they hold: equal ones once. Where the rest shows no difference and the digest does, kinds have another order.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from raymega.cli.plan import text
from raymega.plan.tensor_table import stage_tensors
from raymega.planner.search.selection import best_grid
from raymega.schedule.table import make_schedule
from tests.golden.commands import called
from tests.golden.folding import fold
from tests.golden.remembering import remembered
from tests.golden.scratch import scratch

JOBS = Path(__file__).parents[2] / "jobs"
VARIANTS = {"": (), "-h100": ("--gpu", "h100")}
SEARCHED = {"demo": ("--gpu", "h100", "--top", "3"), "verify": ("--top", "3")}
UNPRICED = frozenset({"qwen3-next-80b-a3b-64gpu"})
"""Jobs whose advice searches for 16 s; that of Qwen2 with experts is alike."""
SHARED = (text._plan_object, best_grid, stage_tensors, make_schedule)
"""What the variants of a plan, and its ranks, have in common."""
PUBLISHED, RUNS = "plans/published.txt", JOBS.with_name("benchmarks") / "published_runs.csv"
RANKS = ', "ranks": '


def job_names() -> list[str]:
    """Every job file, without its suffix."""
    return sorted(path.stem for path in JOBS.glob("*.yaml"))


def files_of(name: str) -> list[str]:
    """What is kept of the job ``name``."""
    searches = [f"plans/{name}-top.txt"] if name in SEARCHED else []
    return [f"plans/{name}{variant}.txt" for variant in _variants(name)] + searches


def _variants(name: str) -> dict[str, tuple[str, ...]]:
    return {
        variant: words for variant, words in VARIANTS.items() if not variant or name not in UNPRICED
    }


def texts_of(name: str) -> dict[str, str]:
    """What the plans of the job ``name`` print."""
    job = str(JOBS / f"{name}.yaml")
    with scratch(), remembered(*SHARED):
        made = [_kept(_printed(job, *options)) for options in _variants(name).values()]
        if name in SEARCHED:
            made.append(fold(_printed(job, *SEARCHED[name]), depth=4))
    return dict(zip(files_of(name), made, strict=True))


def published() -> dict[str, str]:
    """What is predicted of published runs, an object each."""
    with scratch():
        ended = called("plan", "--runs", str(RUNS), "--json")
    return {PUBLISHED: "\n".join(fold(line, depth=1) for line in ended.stdout.splitlines()) + "\n"}


def _printed(job: str, *options: str) -> str:
    ended = called("plan", job, *options, "--json")
    assert ended.code == 0, ended.stderr
    return ended.stdout


def _kept(printed: str) -> str:
    begin = printed.index(RANKS) + len(RANKS)
    ranks, end = json.JSONDecoder().raw_decode(printed, begin)
    digest = hashlib.sha256(printed.encode()).hexdigest()
    head = printed[:begin] + f'"{len(ranks)} of them, below"' + printed[end:]
    return f"sha256 {digest}\n{fold(head, depth=2)}{_by_content(ranks)}"


def _by_content(ranks: list[dict[str, object]]) -> str:
    """One line for the same content, with the stages and numbers of the ranks that hold it."""
    holders: dict[str, list[str]] = {}
    for kind in ranks:
        at = {name: kind.pop(name) for name in ("first_rank", "num_ranks", "pp", "tp")}
        place = f"pp {at['pp']}: {at['num_ranks']} from {at['first_rank']}, tp {at['tp']}"
        holders.setdefault(json.dumps(kind), []).append(place)
    return "".join(f"{text}\n  on {'; '.join(at)}\n" for text, at in holders.items())
