"""`raymega checkpoint` where it changes something: prune, copy, and a save on request."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.checkpoint.tools.inspection import absence_faults, open_checkpoint
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.cli.options import AsJson, Uri
from raymega.cli.output import print_json, relay
from raymega.cli.submit import server_url
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.orchestrate.driver.save_requests import ask_for_save
from raymega.orchestrate.jobs import client as jobs_client
from raymega.orchestrate.jobs.find_run import find_run
from raymega.storage.registry import drop_unfinished, open_store, reading_faults, store_faults


def prune(
    uri: Annotated[str, typer.Argument()],
    older_than_h: Annotated[float, typer.Option("--older-than", min=0)] = 24.0,
    keep_last: Annotated[int, typer.Option(min=0)] = 0,
    keep_every: Annotated[int, typer.Option(min=0)] = 0,
    keep_best: Annotated[int, typer.Option(min=0)] = 0,
    is_dry: Annotated[bool, typer.Option("--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what killed writers left, and with --keep-last a run's older checkpoints.

    Unfinished uploads are invisible but cost space; folders have none. The newest whole checkpoint
    and everything newer always stay, so that a run at work is not disturbed.

    Options:
        uri: A run's folder, or any folder above runs.
        older_than_h: Hours; more than a write under way can take.
        keep_last: Also remove a run's checkpoints beyond so many of the newest, and what dead
            attempts left; 0 touches none.
        keep_every: With --keep-last: keep steps that this divides, too.
        keep_best: With --keep-last: keep so many of least eval/loss, too.
        is_dry: Show what would go, and change nothing.

    Example: raymega checkpoint prune s3://team/runs/my-run --keep-last 2 --dry-run
    """
    if not keep_last and (keep_every or keep_best):
        raise ConfigError(_no_keep_last())
    raise_faults(ConfigError, reading_faults(uri, field="URI"))
    age, now_ = timedelta(hours=older_than_h), datetime.now(UTC)
    aborted = drop_unfinished(uri, older_than=age, now=now_, is_dry=is_dry)
    if not drop_unfinished(uri, older_than=timedelta(0), now=now_, is_dry=True) and not aborted:
        raise_faults(ConfigError, absence_faults(uri))
    deleted: tuple[str, ...] = ()
    if keep_last:
        pruner = Pruner(
            open_store(uri), RetentionPolicy(last=keep_last, every=keep_every, best=keep_best)
        )
        deleted = pruner.expired() if is_dry else pruner.prune()
    if as_json:
        print_json({"uri": uri, "dry_run": is_dry, "aborted": aborted, "deleted": deleted})
        return
    would = "would have " if is_dry else ""
    for key in aborted:
        print(f"{would}aborted the upload of {key}")
    for key in deleted:
        print(f"{would}deleted {key}")
    print(f"{len(aborted)} unfinished uploads older than {older_than_h:g} h at {uri}")
    if keep_last:
        print(f"{len(deleted)} objects of checkpoints that need not be kept")


def copy_(
    uri: Uri,
    target: Annotated[str, typer.Argument(metavar="URI2")],
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to another store, verified; of a run, the newest one.

    The manifest comes last, so the copy exists when it is whole. A copy that broke off goes on with
    the same command. A run can be continued from it: it lies where the run's own would.

    Options:
        target: Folder of a run, in any store.

    Example: raymega checkpoint copy runs/my-run s3://team/runs/my-run
    """
    source, manifest = open_checkpoint(uri)
    raise_faults(ConfigError, store_faults(target, field="URI2"))
    store = open_store(target)
    done = copy_checkpoint(source, manifest, store)
    if as_json:
        print_json(
            {"uri": f"{store.uri}/{done.key}", "step": manifest.step, "bytes": done.num_bytes,
             "files_written": done.num_written, "files_found": done.num_found}
        )  # fmt: skip
        return
    print(
        f"{store.uri}/{done.key}: {done.num_bytes:,} bytes, {done.num_written} files written, "
        f"{done.num_found} were there already"
    )


def now(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    address: str = "auto",
    timeout_s: Annotated[float, typer.Option("--timeout", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Let a run at work save its next step, and wait until that checkpoint is committed.

    Exit codes: 0 committed, 1 failed, late or the run ended first, 2 no such run is at work.

    Options:
        run: The run's name, or its folder if it has a '/'.
        address: Of the run's cluster: auto, HOST:PORT, or its job server http://HOST:8265. A folder
            needs none.
        timeout_s: Longest wait for the commit, in seconds.

    Example: raymega checkpoint now my-run --address http://127.0.0.1:8265
    """
    if "/" not in run and "://" in address:
        raise typer.Exit(_now_over_there(run, address, timeout_s, as_json=as_json))
    uri = run if "/" in run else find_run(run, address=address)
    raise_faults(ConfigError, reading_faults(uri, field="RUN"))
    answer = ask_for_save(open_store(uri), timeout_s=timeout_s)
    if answer.error:
        raise CheckpointError(f"the save of step {answer.step} failed: {answer.error}")
    if as_json:
        print_json({"step": answer.step, "uri": answer.uri})
    else:
        print(f"step {answer.step} is saved: {answer.uri}")


def _now_over_there(run: str, address: str, timeout_s: float, *, as_json: bool) -> int:
    """The cluster's nodes see the run's store; this machine need not."""
    words = ["checkpoint", "now", run, "--address", "auto", "--timeout", str(timeout_s)]
    words += ["--json"] if as_json else []
    write = relay(lambda line: line.startswith("{" if as_json else "step "))
    client = jobs_client.JobsClient(server_url(address))
    return jobs_client.run_on_cluster(words, run=run, client=client, write=write)


def _no_keep_last() -> Fault:
    return Fault(
        fact="--keep-last is not given",
        rule="--keep-every and --keep-best keep checkpoints beside the newest ones",
        remedy="give --keep-last, at least 1",
    )
