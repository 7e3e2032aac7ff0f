"""Command `raymega chaos` without its output: checks of options, the cluster, and the files of the report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from pathlib import Path

from raymega.chaos.experiment import (
    ChaosExperiment,
    DrillOptions,
    Verdict,
    run_baseline,
    run_drill,
    verdict_object,
)
from raymega.chaos.faults import (
    DRAWN,
    KINDS,
    ChaosFault,
    ScheduledFault,
    draw_faults,
    draw_victims,
    parse_faults,
)
from raymega.chaos.network import missing
from raymega.chaos.plot import draw_verdict
from raymega.chaos.sandbox import sandbox
from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.orchestrate.core.rank_placement import block_size
from raymega.plan.run_plan import make_plan

PICTURE_FILE = "chaos.svg"
REPORT_FILE = "report.json"


def drill(
    job_file: Path, overrides: Sequence[str], job: Job, options: DrillOptions
) -> tuple[Verdict, Path]:
    """Run the drill and return its verdict and the folder of the runs.

    Raises:
        ConfigError: A fault is unknown or not possible here, or the job cannot run on this machine's CPUs.
        RaymegaError: The undisturbed run failed.
    """
    faults, scheduled_faults = _faults(job, options)
    # Ray takes whole CPUs for a node, and those of the drill's nodes are fiction: workers get whole ones as well.
    whole = {"cpus_per_worker": float(ceil(job.cluster.cpus_per_worker))}
    job = job.with_values(cluster=whole)
    overrides = (*overrides, f"cluster.cpus_per_worker={whole['cpus_per_worker']:g}")
    out = options.out or Path(tempfile.mkdtemp(prefix="raymega-chaos-"))
    plan = ChaosExperiment(
        job_file=job_file.absolute(),
        overrides=overrides,
        job=job,
        out=out.absolute(),
        options=options,
        faults=faults,
        scheduled_faults=scheduled_faults,
    )
    # Network namespaces need root: create them only for faults that cut links.
    needs_network = any(KINDS[kind].needs_network for kind in _kinds_of(faults, options))
    nodes, cpus = options.nodes, _cpus_per_node(job)
    with sandbox(num_nodes=nodes, cpus_per_node=cpus, has_network=needs_network) as box:
        # The run under faults comes first: it decides how many steps the undisturbed run needs.
        verdict = run_drill(plan, box, lambda last: run_baseline(plan, box, last=last))
    draw_verdict(verdict, out / PICTURE_FILE, title=f"{job.run.name} under faults")
    report = verdict_object(verdict, seed=options.seed)
    (out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    return verdict, out


def _faults(job: Job, options: DrillOptions) -> tuple[list[ChaosFault], Iterator[ScheduledFault]]:
    # all mistakes are reported at once: job, choice of options, kinds, listed faults
    mistakes = [*_job_faults(job)]
    is_listed, is_drawn = bool(options.faults), options.mtbf_s > 0
    if is_listed == is_drawn:
        fact = f"--fault {options.faults!r} and --mtbf {options.mtbf_s:g}"
        rule = "faults are listed or random: exactly one of the two options must be given"
        mistakes.append(
            Fault(fact=fact, rule=rule, remedy="give --fault kill-worker@5 or --mtbf 30")
        )
    unread = {"--kinds": options.kinds, "--seconds": options.seconds} if not is_drawn else {}
    mistakes += [
        Fault(
            fact=f"{name} {value} without --mtbf",
            rule="it is of random faults",
            remedy=f"leave {name} out",
        )
        for name, value in unread.items()
        if value and is_listed
    ]
    kinds = _names(options.kinds) or list(DRAWN)
    for kind in set(kinds) - set(KINDS):
        mistakes.append(
            Fault(
                fact=f"--kinds {kind!r} names no fault",
                rule=f"faults are {', '.join(KINDS)}",
                remedy="use --kinds kill-worker,kill-node",
            )
        )
    listed: list[ChaosFault] = []
    world_size, seed = make_plan(job).grid.world_size, options.seed
    if is_listed:
        num = options.faults.count(",") + 1
        victims = draw_victims(num, seed=seed, world_size=world_size)
        try:
            listed = parse_faults(options.faults, rank_of=victims)
        except ValueError as error:
            mistakes += error.args
    mistakes += _mlflow_faults(job, _kinds_of(listed, options))
    raise_faults(ConfigError, mistakes)
    # Last, as it tries to create a namespace.
    raise_faults(ConfigError, _cable_faults(_kinds_of(listed, options)))
    scheduled_faults = draw_faults(
        mtbf_s=options.mtbf_s or 1.0, seed=seed, world_size=world_size, kinds=kinds
    )
    return listed, scheduled_faults if is_drawn else islice(scheduled_faults, 0)


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _kinds_of(listed: Sequence[ChaosFault], options: DrillOptions) -> list[str]:
    """Return every kind of fault that may be injected."""
    return [fault.kind for fault in listed] or _names(options.kinds) or list(DRAWN)


def _cable_faults(kinds: Sequence[str]) -> Iterator[Fault]:
    asked = [kind for kind in kinds if KINDS[kind].needs_network]
    if asked and (why := missing()):
        yield Fault(
            fact=f"fault {asked[0]} is not possible here: {why}",
            rule="it needs nodes in network namespaces of their own, whose links can be cut",
            remedy="run the drill as root on Linux with iproute2, or use freeze-node",
        )


def _mlflow_faults(job: Job, kinds: Sequence[str]) -> Iterator[Fault]:
    tracking = job.tracking
    if "mlflow-down" in kinds and (
        tracking.mlflow_uri == "off" or "mlflow" not in tracking.trackers
    ):
        yield Fault(
            fact=f"fault mlflow-down with tracking.mlflow_uri={tracking.mlflow_uri!r} and "
            f"tracking.trackers={list(tracking.trackers)}",
            rule="the run writes to no database that could be down",
            remedy="add --set tracking.mlflow_uri=run, or leave the fault out",
        )


def _job_faults(job: Job) -> Iterator[Fault]:
    if job.cluster.device == "cuda":
        yield Fault(
            fact="cluster.device='cuda'",
            rule="a drill starts its own cluster on this machine, whose nodes have CPUs only",
            remedy="add --set cluster.device=cpu, and make the model small",
        )
    if job.tracking.mlflow_uri not in ("off", "run"):
        yield Fault(
            fact=f"tracking.mlflow_uri={job.tracking.mlflow_uri!r}",
            rule="the runs of a drill are not recorded on a server, and mlflow-down locks a file",
            remedy="add --set tracking.mlflow_uri=run, or off",
        )


def _cpus_per_node(job: Job) -> float:
    """Return the CPUs of a node such that two nodes hold the grid and its spares; the others are spare."""
    plan = make_plan(job)
    block = block_size(plan.grid, job.parallel)
    workers = plan.grid.world_size + job.elastic.spares
    return ceil(workers / 2 / block) * block * job.cluster.cpus_per_worker
