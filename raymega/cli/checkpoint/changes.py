"""Commands of `raymega checkpoint` that write: prune, copy and now."""

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
from raymega.convert.huggingface.extra_files import bring_along
from raymega.errors import CheckpointError, ConfigError, counted, raise_faults
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
    """Abort unfinished uploads, and with --keep-last remove a run's older checkpoints.

    Unfinished uploads of killed writers are invisible but cost space in an object store. The newest
    complete checkpoint and everything newer are always kept, so that an active run is not disturbed.

    Options:
        uri: A run's folder, or any folder above runs.
        older_than_h: Minimum age of the uploads to abort, in hours; longer than any write takes.
        keep_last: Keep this many of a run's newest checkpoints; remove older ones and the files of
            failed attempts. 0 removes none.
        keep_every: With --keep-last: also keep checkpoints whose step is a multiple of this.
        keep_best: With --keep-last: also keep this many with the lowest eval/loss.
        is_dry: Only show what would be removed.

    Example: raymega checkpoint prune s3://team/runs/my-run --keep-last 2 --dry-run
    """
    if not keep_last and (keep_every or keep_best):
        raise ConfigError(
            fact="--keep-last is not given",
            rule="--keep-every and --keep-best keep checkpoints beside the newest ones",
            remedy="give --keep-last, at least 1",
        )
    raise_faults(ConfigError, reading_faults(uri, field="URI"))
    # unfinished uploads
    age, now_ = timedelta(hours=older_than_h), datetime.now(UTC)
    aborted = drop_unfinished(uri, older_than=age, now=now_, is_dry=is_dry)
    # Nothing to abort at any age: a mistyped folder must be an error, not an empty result.
    if not drop_unfinished(uri, older_than=timedelta(0), now=now_, is_dry=True) and not aborted:
        raise_faults(ConfigError, absence_faults(uri))
    deleted: tuple[str, ...] = ()
    # checkpoints beyond the retention policy
    if keep_last:
        pruner = Pruner(
            open_store(uri), RetentionPolicy(last=keep_last, every=keep_every, best=keep_best)
        )
        deleted = pruner.expired() if is_dry else pruner.prune()
    if as_json:
        print_json({"uri": uri, "dry_run": is_dry, "aborted": aborted, "deleted": deleted})
        return
    # output
    would = "would have " if is_dry else ""
    for key in aborted:
        print(f"{would}aborted the upload of {key}")
    for key in deleted:
        print(f"{would}deleted {key}")
    print(f"{len(aborted)} unfinished uploads older than {older_than_h:g} h at {uri}")
    if keep_last:
        print(f"{len(deleted)} objects of checkpoints that the policy does not keep")


def copy_(
    uri: Uri,
    target: Annotated[str, typer.Argument(metavar="URI2")],
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to another store and verify it; for a run, its newest one.

    The manifest is written last, so that a copy exists only when it is complete. The same command
    continues an interrupted copy. A run can resume from the copy. Its tokenizer and the files of the
    published model that it started from come along, so that the copy can be evaluated and exported.

    Options:
        target: Folder of the target run, in any store.

    Example: raymega checkpoint copy runs/my-run s3://team/runs/my-run
    """
    # read the source before the target is opened or created
    source, manifest = open_checkpoint(uri)
    raise_faults(ConfigError, store_faults(target, field="URI2"))
    store = open_store(target)
    done = copy_checkpoint(source, manifest, store)
    num_along = bring_along(source, manifest, store)
    if as_json:
        print_json(
            {"uri": f"{store.uri}/{done.key}", "step": manifest.step, "bytes": done.num_bytes,
             "files_written": done.num_written, "files_found": done.num_found,
             "model_files_written": num_along}
        )  # fmt: skip
        return
    print(
        f"{store.uri}/{done.key}: {counted(done.num_bytes, 'byte')}, {counted(done.num_written, 'file')} written, "
        f"{done.num_found} existed already; {counted(num_along, 'file')} of tokenizer and published model written"
    )


def now(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    address: str = "auto",
    timeout_s: Annotated[float, typer.Option("--timeout", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Ask an active run for a checkpoint of its next step, and wait until it is committed.

    Exit codes: 0 committed, 1 failed, timed out or the run ended first, 2 no such active run.

    Options:
        run: Name of the run, or its folder (anything with a '/').
        address: Address of the run's cluster: auto, HOST:PORT, or its job server http://HOST:8265. Not
            needed with a folder.
        timeout_s: Maximum wait for the commit, in seconds.

    Example: raymega checkpoint now my-run --address http://127.0.0.1:8265
    """
    # only the name and a job server: the cluster finds the run's folder
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
    """Run `checkpoint now` as a job on the cluster, whose nodes can read the run's store; return its exit code."""
    words = ["checkpoint", "now", run, "--address", "auto", "--timeout", str(timeout_s)]
    words += ["--json"] if as_json else []
    write = relay(lambda line: line.startswith("{" if as_json else "step "))
    client = jobs_client.JobsClient(server_url(address))
    return jobs_client.run_on_cluster(words, run=run, client=client, write=write)
