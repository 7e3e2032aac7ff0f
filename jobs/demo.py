"""Demo: prepare real text, train a model on 8 ranks, kill a worker half-way, and report what was measured.

All figures are of this run. Exits 1 when the model has not learnt enough.
"""

import os
import signal
import statistics
import sys
import sysconfig
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raymega import api
from raymega.cli.progress import phase_bars, step_bar
from raymega.errors import RaymegaError
from raymega.events import (
    CheckpointCommitted,
    EvaluationFinished,
    Recovered,
    RunEvent,
    StepFinished,
    WorkersStarted,
)
from raymega.launch import local_folder
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.tracking.console import ConsoleSink

ROOT = Path(__file__).parent.parent
OUT = ROOT / "demo-out"
JOB_FILE = ROOT / "jobs" / "demo.yaml"
VICTIM = 5
MIN_GAIN_NATS = 0.8
NO_PROSE = ("test/", "tests/", "idle_test/", "site-packages/", "dist-packages/", "__pycache__/")


class Witness:
    """Sink that collects the figures of the report, and kills one worker after half of the steps."""

    def __init__(self, kill_step: int) -> None:
        self._kill_step = kill_step
        self._pids = {}
        self._killed_s = None
        self.training_again_s = None
        self.tokens_per_s, self.saves = [], []
        self.recovered = None
        self.validation_loss = None

    def emit(self, event: RunEvent) -> None:
        match event:
            case WorkersStarted():
                self._pids = dict(event.pids)
            case StepFinished():
                self.tokens_per_s.append(event.metrics["train/tokens_per_s"])
                if event.attempt > 1 and self.training_again_s is None:
                    self.training_again_s = time.monotonic() - self._killed_s
                if event.step == self._kill_step and self._killed_s is None:
                    self._killed_s = time.monotonic()
                    os.kill(self._pids[VICTIM], signal.SIGKILL)
            case CheckpointCommitted():
                self.saves.append(event)
            case Recovered():
                self.recovered = event
            case EvaluationFinished():
                self.validation_loss = event.metrics["eval/loss"]

    def close(self, timeout_s: float) -> None:
        pass


def prepare_corpus(console: Console, out: Path):
    """Prepare the source of Python's standard library as a corpus, and return its metadata."""
    stdlib = sysconfig.get_paths()["stdlib"]
    console.rule("1  Prepare real text")
    console.print(f"Source code of the Python standard library: {stdlib} (without tests)")
    options = PrepareOptions(
        inputs=(stdlib,),
        out=str(out),
        tokenizer="bpe:2048",
        valid_fraction=0.02,
        include=("*.py",),
        exclude=NO_PROSE,
        address="local",
    )
    with phase_bars() as show:
        done = prepare(options, on_progress=show)
    meta = done.meta
    how = "already prepared" if done.is_cached else f"prepared in {done.seconds:.1f} s"
    console.print(f"{meta.source.num_bytes / 1e6:.1f} MB in {meta.source.num_files} files, {how}:")
    for name, split in meta.splits.items():
        console.print(f"  {name:5} {split.num_documents:6,} files {split.num_tokens:12,} tokens")
    return meta


def report(console: Console, witness: Witness, entropy: float, result, seconds: float) -> bool:
    """Print the measured figures, and return whether the model has learnt enough."""
    console.rule("3  Measured in this run")
    table = Table(show_header=False, box=None, padding=(0, 2))
    gain = entropy - witness.validation_loss
    stalls = [save.stall_s * 1000 for save in witness.saves]
    writes = [save.save_s * 1000 for save in witness.saves]
    recovered = witness.recovered
    rows = {
        "validation loss": f"{witness.validation_loss:.4f} nats per token",
        "unigram entropy of the validation text": f"{entropy:.4f} nats per token",
        "gain over unigrams": f"{gain:.4f} nats per token (expected: at least {MIN_GAIN_NATS})",
        "throughput, median step": f"{statistics.median(witness.tokens_per_s):,.0f} tokens/s",
        "checkpoint stall, median": f"{statistics.median(stalls):.1f} ms",
        "checkpoint save in total, median": f"{statistics.median(writes):.1f} ms",
        "worker killed: detected after": f"{recovered.detection_s:.3f} s",
        "worker killed: first step of the new attempt after": f"{witness.training_again_s:.1f} s",
        f"worker killed: {recovered.lost_steps} lost steps recomputed after": (
            f"{recovered.recovery_s:.1f} s"
        ),
        "goodput": f"{result.goodput:.1%}",
        "whole demo": f"{seconds:.0f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    return gain >= MIN_GAIN_NATS


def show_places(console: Console, job) -> None:
    folder = local_folder(job)
    console.rule("4  Output files")
    for name in (
        "loss.svg",
        "experts.svg",
        "timeline.svg",
        "trace.json",
        "metrics.jsonl",
        "logs",
        "checkpoints",
    ):
        console.print(f"  {folder / name}", soft_wrap=True)
    console.print(f"  {job.data.path}", soft_wrap=True)
    mlflow = Path(sys.executable).parent / "mlflow"
    console.print("Write all of it as one page with:")
    console.print(f"  raymega report {folder} --out {OUT / 'report.html'}", soft_wrap=True)
    console.print("Open MLflow, and choose Model training on its left, with:")
    console.print(
        f"  {mlflow} server --backend-store-uri sqlite:///{folder / 'mlflow.db'} --port 5000",
        soft_wrap=True,
    )


def main() -> int:
    began = time.monotonic()
    console = Console(highlight=False)
    os.chdir(ROOT)
    meta = prepare_corpus(console, OUT / "corpus")
    console.rule("2  Train on 8 ranks, kill one half-way, recover and finish")
    name = f"run.name=demo-{time.strftime('%Y%m%d-%H%M%S')}"
    job = api.load_job(JOB_FILE, [name], is_for_training=True)
    console.print(f"seed {job.run.seed}; rank {VICTIM} is killed after step {job.run.steps // 2}")
    witness = Witness(job.run.steps // 2)
    with step_bar() as bar:
        lines = ConsoleSink(sys.stdout, every=job.tracking.console_every)
        result = api.train(job, address="local", sinks=(witness, bar, lines))
    has_learnt = report(console, witness, meta.valid_entropy, result, time.monotonic() - began)
    show_places(console, job)
    if not has_learnt:
        console.print("The demo FAILED: the model has not learnt enough.", style="bold red")
    return 0 if has_learnt else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RaymegaError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
