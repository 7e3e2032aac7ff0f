"""Client of a cluster's Ray job server: submits, follows and stops jobs, and returns exit codes.

``jobs/submission.py`` composes what is submitted. Losing the connection never ends a job.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, PreemptedError, StorageError, one_line
from raymega.orchestrate.jobs.submission import Submission, make_submission, next_attempt
from raymega.session import set_environment
from raymega.storage.retry import RETRY

log = logging.getLogger(__name__)

POLL_S = 1.0
AWAY_TIMEOUT_S = 600.0
"""Longest wait for a job server that has stopped answering, in seconds."""
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
PASSING = ("No available agent", "Cannot connect to host", "Server disconnected")
"""Words of a job server on a cluster whose nodes have just started, or are busy."""
COMMAND = ("python", "-c", "from raymega.cli.main import run; run()")
SAVED = re.compile(rf"^{PreemptedError.__name__}: ", re.MULTILINE)
"""Last line of a driver that was stopped and has saved; Ray keeps no exit code of stopped jobs."""


def job_server(address: str) -> str:
    """Return the job server's URL, ``http://HOST:8265``, from that, ``HOST:8265`` or ``auto``.

    Raises:
        ConfigError: The address cannot be that of a job server.
    """
    if address == "auto":
        return DEFAULT_ADDRESS
    if re.match(r"https?://[^/@]+/?$", address):
        return address.rstrip("/")
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/@\s]+):\d+", address):
        return f"http://{address}"
    raise ConfigError(_address_fault(address))


def submit_job(
    job: Job,
    *,
    client: JobsClient,
    job_file: Path,
    overrides: Sequence[str],
    working_dir: Path,
    as_json: bool = False,
) -> Submission:
    """Submit the next attempt of a run, with make_submission's arguments.

    Raises:
        ConfigError: The run has a job that has not ended, or the submission has faults.
    """
    # one driver a run: refuse early, before the working folder is shipped
    running = client.live_submission(job.run.name)
    if running:
        raise ConfigError(
            fact=f"run {job.run.name!r} is already at work as job {running!r}",
            rule="a run has one driver at a time",
            remedy=f"watch it with `ray job logs --address {client.address} --follow {running}`, stop it "
            f"with `ray job stop --address {client.address} {running}`, or take another run.name",
        )
    submission = make_submission(
        job,
        job_file=job_file,
        overrides=overrides,
        working_dir=working_dir,
        attempt=next_attempt(job.run.name, client.submission_ids(), run_uri=job.run_uri),
        as_json=as_json,
    )
    client.submit(submission)
    return submission


def stop_job(job: Job, *, client: JobsClient) -> int:
    """Ask the run's job to save and stop, wait for its end, and return the driver's exit code.

    Raises:
        ConfigError: The run has no live job.
    """
    running = client.live_submission(job.run.name)
    if not running:
        raise ConfigError(
            fact=f"no job of run {job.run.name!r} is at work on {client.address}",
            rule="only a job that was submitted and has not ended can be stopped",
            remedy=f"look at `ray job list --address {client.address}`",
        )
    client.stop(running)
    return client.wait(running)


def run_on_cluster(
    words: Sequence[str], *, run: str, client: JobsClient, write: Callable[[str], None]
) -> int:
    """Run ``raymega WORDS`` on the cluster and return its exit code; ``write`` receives its output.

    It runs as a job with the working folder of the run's own job, for commands that need the cluster's
    network or file systems.
    """
    name = f"{run}-{words[1]}-{uuid4().hex[:8]}"
    client.submit_beside(run, submission_id=name, entrypoint=shlex.join([*COMMAND, *words]))
    return client.follow(name, write)


class JobsClient:
    """A connection to one job server."""

    def __init__(self, address: str) -> None:
        """Connect to the URL that :func:`job_server` returned.

        Raises:
            ConfigError: No server answers there, it refuses the token, or it runs another Ray version.
        """
        self.address = address
        set_environment(is_private=False)
        try:
            self._client = JobSubmissionClient(address)
            cluster_ray = self._client._server_ray_version
        except (ConnectionError, RuntimeError, AuthenticationError) as error:
            raise ConfigError(_refusal(address, error)) from error
        if cluster_ray != ray.__version__:
            raise _other_version(str(cluster_ray))

    def submission_ids(self) -> list[str]:
        """Return the ids of all submissions that the cluster remembers."""
        return [job.submission_id for job in self._client.list_jobs() if job.submission_id]

    def live_submission(self, run: str) -> str:
        """Return the id of a job of ``run`` that has not ended; '' when there is none."""
        for job in self._client.list_jobs():
            is_of_run = (job.metadata or {}).get("raymega_run") == run
            if is_of_run and job.submission_id and not job.status.is_terminal():
                return str(job.submission_id)
        return ""

    def submit(self, submission: Submission) -> None:
        """Upload the working folder and queue the job.

        Raises:
            ConfigError: Another submission took the id in the meantime.
            StorageError: The server refused the job for another reason.
        """
        try:
            self._queue(
                entrypoint=submission.entrypoint,
                submission_id=submission.submission_id,
                runtime_env={
                    "working_dir": str(submission.working_dir),
                    "env_vars": dict(submission.env_vars),
                },
                metadata=dict(submission.metadata),
            )
        except (RuntimeError, OSError) as error:
            # Ray's server tells the two cases apart by text only
            if "already exists" in str(error):
                raise ConfigError(
                    fact=f"the cluster has a job {submission.submission_id!r} since a moment ago",
                    rule="an attempt of a run is submitted once",
                    remedy="somebody else submitted the same run; follow that job, or take another run.name",
                ) from error
            raise StorageError(_not_taken(submission.submission_id, error)) from error

    def submit_beside(self, run: str, *, submission_id: str, entrypoint: str) -> None:
        """Queue a small job beside the run; it shares the working folder of the run's live job, if any.

        Raises:
            StorageError: The server refused it.
        """
        # the folder's URI in Ray's package store: nothing is uploaded again
        running = self.live_submission(run)
        of_run = self._client.get_job_info(running).runtime_env if running else None
        folder = (of_run or {}).get("working_dir")
        try:
            self._queue(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env={"working_dir": folder} if folder else None,
                metadata={"raymega_beside": run},
            )
        except (RuntimeError, OSError) as error:
            raise StorageError(_not_taken(submission_id, error)) from error

    def _queue(self, **request: Any) -> None:
        """Queue a job; a cluster whose agents are still starting is asked again for half a minute."""

        def ask(number: int) -> None:
            try:
                self._client.submit_job(**request)
            except RuntimeError as error:
                # its answer to the try before was lost
                if number and "already exists" in str(error):
                    return
                if any(words in str(error) for words in PASSING):
                    raise ConnectionError(_last_line(error)) from error
                raise

        RETRY.run(ask)

    def stop(self, submission_id: str) -> None:
        """Ask a job to save and end; returns at once."""
        self._client.stop_job(submission_id)

    def follow(self, submission_id: str, write: Callable[[str], None]) -> int:
        """Pass the driver's output to ``write`` until the job ends, and return the exit code."""
        # the log stream may break off while the job continues
        try:
            asyncio.run(self._tail(submission_id, write))
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            log.warning("the log stream broke off (%s); waiting for the job's end", error)
        return self.wait(submission_id)

    def wait(self, submission_id: str) -> int:
        """Wait for the job's end and return the driver's exit code.

        Raises:
            StorageError: The job server did not answer for AWAY_TIMEOUT_S.
        """
        # each answer moves the deadline
        deadline_s = time.monotonic() + AWAY_TIMEOUT_S
        while True:
            try:
                details = self._client.get_job_info(submission_id)
                if details.status.is_terminal():
                    return self._exit_code(submission_id, details)
                deadline_s = time.monotonic() + AWAY_TIMEOUT_S
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline_s:
                    raise StorageError(
                        fact=f"{self.address} has not answered for {AWAY_TIMEOUT_S:g} s",
                        rule=f"the end of {submission_id!r} is read from it",
                        remedy="the job may be running: look at the head, then submit the same job again",
                    ) from error
            time.sleep(POLL_S)

    async def _tail(self, submission_id: str, write: Callable[[str], None]) -> None:
        async for lines in self._client.tail_job_logs(submission_id):
            write(lines)

    def _exit_code(self, submission_id: str, details: JobDetails) -> int:
        """Return the driver's exit code, where Ray's command line knows only 0 and 1."""
        if details.status == JobStatus.SUCCEEDED:
            return 0
        # stopped: only the driver's last line says whether it saved
        if details.status == JobStatus.STOPPED:
            has_saved = SAVED.search(self._client.get_job_logs(submission_id)) is not None
            return PreemptedError.exit_code if has_saved else 1
        # failed: a driver that never ran has no code
        if details.driver_exit_code is None:
            log.error("the driver did not run: %s", details.message)
        return max(details.driver_exit_code or 1, 1)


def _address_fault(address: str) -> Fault:
    # credentials before an '@' are not shown
    shown = re.sub(r"//[^/@]*@", "//...@", address)
    rule = "jobs are submitted to a cluster's job server, http://HOST:8265"
    if address.startswith("ray://"):
        host = address.removeprefix("ray://").partition(":")[0]
        remedy = f"use http://{host}:8265; a remote client cannot be a driver"
    elif address == "local":
        remedy = "there is no cluster to submit to; run `raymega train JOB.yaml --address local`"
    else:
        remedy = "give http://HOST:8265; through a tunnel, http://127.0.0.1:8265"
    return Fault(fact=f"address={shown!r}", rule=rule, remedy=remedy)


def _refusal(address: str, error: Exception) -> Fault:
    if isinstance(error, AuthenticationError):
        return Fault(
            fact=f"the job server at {address} refused the token",
            rule="the cluster's token and this machine's must agree",
            remedy="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN), or "
            "RAY_AUTH_MODE=disabled for a cluster without tokens",
        )
    return Fault(
        fact=f"no job server answers at {address} ({str(error).splitlines()[0]})",
        rule="it must be a Ray head's dashboard, port 8265 by default",
        remedy="check host and port; for a cluster of `ray up` open a tunnel with "
        "`ray dashboard CLUSTER.yaml`",
    )


def _other_version(cluster_ray: str) -> ConfigError:
    return ConfigError(
        fact=f"the cluster runs ray {cluster_ray}, this machine ray {ray.__version__}",
        rule="the driver that plans here and the one that runs there must agree",
        remedy=f"install ray=={cluster_ray} here, or bring the cluster to {ray.__version__}",
    )


def _not_taken(submission_id: str, error: Exception) -> Fault:
    return Fault(
        fact=f"the job server did not take {submission_id!r}: {one_line(_last_line(error), 300)}",
        rule="it must store the working folder and the job",
        remedy="look at the head's dashboard.log; a full disk is a frequent cause",
    )


def _last_line(error: Exception) -> str:
    """Return an error's last line: the server answers with whole tracebacks, of which it names the cause."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
