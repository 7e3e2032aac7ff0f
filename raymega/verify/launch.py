"""Client of the fork server: runs layouts in processes of this machine without importing torch here.

`fork_server.py` is the server and `worker.py` the code of a rank.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from raymega.config.schema import Job
from raymega.errors import InternalError
from raymega.evaluate.plan import plan_beside
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.verify.compare import RankResult
from raymega.verify.layout import Layout
from raymega.verify.legal_layouts import with_layout
from raymega.verify.results import failure_path, read_eval_losses, read_result, result_path
from raymega.verify.shares import LayoutFailedError, commit_shares
from raymega.verify.tasks import is_beside

START_TIMEOUT_S = 120.0
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
STOP_TIMEOUT_S = 5.0


class ForkServer:
    """Handle of the fork server, which runs one layout at a time; made by :func:`open_fork_server`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, *, timeout_s: float) -> None:
        self._process, self._folder, self._timeout_s = process, folder, timeout_s

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    @contextmanager
    def run(
        self, job: Job, layout: Layout, *, steps: int, save_to: str = "", restore: str = ""
    ) -> Iterator[list[RankResult]]:
        """Train to step ``steps`` on ``layout``; yield the results by rank, readable in the body only.

        Args:
            job: Job that trains.
            layout: Layout of the ranks. Where it has workers beside the run, these score the tasks afterwards.
            steps: Number of steps, those before the checkpoint included.
            save_to: Store to which the ranks save after the last step, for another run; empty saves nothing.
            restore: URI of the checkpoint from which the ranks begin; empty begins at step 0.

        Raises:
            LayoutFailedError: A rank raised, died or took longer than the timeout.
        """
        trained = with_layout(job, layout)
        is_scored = is_beside(trained) and not save_to
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as place:
            folder = Path(place)
            store = str(folder / "checkpoints") if is_scored else save_to
            options = {"steps": steps, "save_to": store, "restore": restore}
            self._run_ranks("train", make_plan(trained), folder, options)
            results = [read_result(folder, rank) for rank in range(layout.world_size)]
            if is_scored:
                found = self._score_beside(trained, commit_shares(results, store), folder)
                scores = shared_out(found, len(results))
                results = [
                    replace(each, eval_losses={**each.eval_losses, **own})
                    for each, own in zip(results, scores, strict=True)
                ]
            yield results

    def _score_beside(self, job: Job, uri: str, folder: Path) -> list[dict[str, float]]:
        """Score the tasks as workers beside the run do, from its checkpoint; return each rank's number by name."""
        plan, place = plan_beside(job), folder / "beside"
        place.mkdir()
        self._run_ranks("score", plan, place, {"restore": uri})
        return [read_eval_losses(place, rank) for rank in range(plan.grid.world_size)]

    def _run_ranks(
        self, work: str, plan: RunPlan, folder: Path, options: Mapping[str, object]
    ) -> None:
        """Run ``work`` on every rank of a plan to its end; the results lie in ``folder``."""
        request = {
            "work": work,
            "plan": plan.to_json(),
            "folder": str(folder),
            "world_size": plan.grid.world_size,
            "timeout_s": self._timeout_s,
            "options": options,
        }
        late = self._ask(request)
        _raise_failures(folder, plan.grid.world_size, late, self._timeout_s)

    def _ask(self, request: Mapping[str, object]) -> list[int]:
        assert self._process.stdin and self._process.stdout, "both are pipes"
        wait_s = self._timeout_s + START_TIMEOUT_S
        # A server that died shows below, as a missing answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], wait_s)
        answer = self._process.stdout.readline() if readable else ""
        if not answer:
            raise self._lost(wait_s)
        late: list[int] = json.loads(answer)["late"]
        return late

    def _lost(self, wait_s: float) -> InternalError:
        log = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return InternalError(
            fact="the process that starts ranks gave no answer" + (f": {log[-1]}" if log else ""),
            rule=f"it must stay alive and answer within {wait_s:g} s",
            remedy="check that torch can be imported and that memory suffices",
        )


def shared_out(scores: Sequence[Mapping[str, float]], num_ranks: int) -> list[dict[str, float]]:
    """Return the numbers of workers beside a run as those of its ranks, so that each is compared.

    A rank has those of one worker, or the mean over several that should be equal.
    """
    owned = [scores[rank::num_ranks] or [scores[rank % len(scores)]] for rank in range(num_ranks)]
    return [{name: fmean(each[name] for each in own) for name in own[0]} for own in owned]


def count_gpus() -> int:
    """Return the number of GPUs that torch finds on this machine, asked in a process of its own."""
    words = [sys.executable, "-c", COUNT_GPUS]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = ended.stdout.split()
    return int(lines[-1]) if ended.returncode == 0 and lines else 0


@contextmanager
def open_fork_server(*, timeout_s: float) -> Iterator[ForkServer]:
    """Start the fork server; end it, its ranks and their files after the body.

    Args:
        timeout_s: Longest seconds of one layout.
    """
    # The server imports the same modules as this process, wherever they came from.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from raymega.verify.fork_server import main; main(sys.argv[1])"
    )
    with tempfile.TemporaryDirectory(prefix="raymega-verify-") as folder:
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C reaches this process alone
            )
        try:
            yield ForkServer(process, Path(folder), timeout_s=timeout_s)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """Close the server's stdin, which ends it and its ranks; kill it after STOP_TIMEOUT_S."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe:
                pipe.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _raise_failures(folder: Path, world_size: int, late: list[int], timeout_s: float) -> None:
    # one line a rank that left no result
    texts = {}
    for rank in range(world_size):
        lines: list[str] = []
        if failure_path(folder, rank).is_file():
            lines = failure_path(folder, rank).read_text(encoding="utf-8").strip().splitlines()
        # a rank may be killed between making its file and writing to it
        if lines:
            texts[rank] = lines[-1]
        elif (
            rank in late
        ):  # also one that hangs behind its results, as in the last gather of weights
            texts[rank] = "killed while it waited"
        elif not result_path(folder, rank).is_file():
            texts[rank] = "died without a report"
    if not texts:
        return
    # All ranks late is a deadlock; else the first rank with an error of its own is the cause.
    if len(late) == world_size:
        raise LayoutFailedError(f"no rank ended within {timeout_s:g} s")
    raise LayoutFailedError(_first_cause(texts))


def _first_cause(texts: dict[int, str]) -> str:
    """Return the likely cause in a line: own errors before lost peers, these before killed ranks."""

    def weight(rank: int) -> tuple[bool, bool, int]:
        text = texts[rank]
        return (text.startswith("killed"), "CommunicationError" in text, rank)

    first = min(texts, key=weight)
    return f"rank {first}: {texts[first]}"
