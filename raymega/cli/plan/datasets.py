"""Output of `raymega plan` on datasets: what a run reads of each, stage by stage."""

from __future__ import annotations

from dataclasses import asdict

from raymega.cli.output import table
from raymega.config.data import is_computed
from raymega.config.schema import Job


def datasets_object(job: Job) -> dict[str, object]:
    """Return what the run reads of each dataset as a JSON object; empty for one dataset that is no stream."""
    found: dict[str, object] = {}
    if _are_computed(job):
        return found
    from raymega.data.blends.epochs import planned_reads, streamed_reads

    if job.data.sources or job.data.stages:
        found["datasets"] = [asdict(use) for use in planned_reads(job)]
    if streamed := streamed_reads(job):
        found["streaming"] = asdict(streamed)
    return found


def show_datasets(job: Job) -> None:
    """Print what the run reads of each dataset; nothing for one dataset that is no stream."""
    if _are_computed(job):
        return
    from raymega.data.blends.epochs import planned_reads, streamed_reads

    if streamed := streamed_reads(job):
        print(
            f"\ndata from object stores: {streamed.cached_bytes:,} bytes of disk a node, "
            f"{streamed.step_bytes:,} bytes a step that each node fetches"
        )
    if not job.data.sources and not job.data.stages:
        return
    rows = [
        (
            f"{use.first_sample:,}",
            use.dataset,
            f"{use.weight:.4g}",
            f"{use.samples:,}",
            f"{use.tokens:,}",
            "not known here" if use.epochs is None else f"{use.epochs:.3g}",
        )
        for use in planned_reads(job)
    ]
    print("\ndatasets; epochs count from the begin of the run")
    print(table(("from sample", "dataset", "share", "samples", "tokens", "epochs"), rows))


def _are_computed(job: Job) -> bool:
    """Return whether the run reads one dataset and no file; what reads files takes a tenth of a plan's time to import."""
    section = job.data
    return not section.sources and not section.stages and all(map(is_computed, section.datasets))
