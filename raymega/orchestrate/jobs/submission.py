"""Composes a Ray job from a job file: id, entrypoint, environment, metadata; and refuses bad ones.

It reads the job file and the working folder. ``jobs/client.py`` talks to the cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from raymega.checkpoint.format.epochs import newest_epoch
from raymega.config.paths import PATH_LISTS, absolute_path, with_absolute_paths
from raymega.config.schema import Job
from raymega.config.yaml_text import read_yaml
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.ray_private import walk_shipped_files
from raymega.storage.registry import open_store, reading_faults

MAX_WORKING_DIR_BYTES = 512 * 2**20
"""Ray's limit of a runtime_env package; above it the upload fails, after minutes."""
STOP_MARGIN_S = 90
"""Time after elastic.stop_timeout_s for pending commits, trackers and workers to end, in seconds."""
SCRIPT = "jobs/train.py"
SQLITE = "sqlite:///"
PATH_FIELDS = (
    "data.path",
    "checkpoint.uri",
    "checkpoint.local_uri",
    "checkpoint.init_from",
    "checkpoint.init_adapter",
    "tracking.mlflow_uri",
)
GIT_TIMEOUT_S = 10.0
NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A Ray job to submit.

    Attributes:
        submission_id: Id of the job, ``<run>-a<attempt>``; Ray accepts each id once.
        entrypoint: Command line of the driver.
        working_dir: Folder that is shipped to every node.
        env_vars: Environment variables of driver and workers, added to their node's own.
        metadata: Texts that ``ray list jobs`` and the dashboard show.
    """

    submission_id: str
    entrypoint: str
    working_dir: Path
    env_vars: Mapping[str, str]
    metadata: Mapping[str, str]


def make_submission(
    job: Job,
    *,
    job_file: Path,
    overrides: Sequence[str],
    working_dir: Path,
    attempt: int,
    as_json: bool = False,
) -> Submission:
    """Return the Ray job of a run; relative paths of the job file are made absolute.

    Args:
        job: Job as read from ``job_file`` with ``overrides``.
        job_file: Path of the job file, which must be inside ``working_dir``.
        overrides: Overrides as ``section.field=value``.
        working_dir: Folder to ship.
        attempt: Number of the attempt, see next_attempt.
        as_json: Whether the driver writes JSON lines.

    Raises:
        ConfigError: The submission has faults; all of them are listed.
    """
    # every fault at once
    root = working_dir.expanduser().resolve()
    faults = [*_job_file_faults(job_file, root), *working_dir_faults(root)]
    raise_faults(ConfigError, faults)
    # command line: the user's overrides, then those that make paths absolute
    words = [*_command(root), job_file.resolve().relative_to(root).as_posix()]
    absolute = absolute_overrides(job_file, overrides)
    fields = {override.partition("=")[0] for override in absolute}
    kept = [override for override in overrides if override.partition("=")[0].strip() not in fields]
    for override in [*kept, *absolute]:
        words += ["--set", override]
    # `ray job stop` kills the driver after this time, which must cover its last save
    stop_wait_s = ceil(job.elastic.stop_timeout_s) + STOP_MARGIN_S
    return Submission(
        submission_id=f"{job.run.name}-a{attempt}",
        entrypoint=shlex.join([*words, *(["--json"] if as_json else [])]),
        working_dir=root,
        env_vars={"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)},
        metadata={
            "job_name": job.run.name,  # Ray's own key, for its list of jobs
            "raymega_run": job.run.name,
            "raymega_attempt": str(attempt),
            "raymega_config": config_hash(job),
            "raymega_git": git_commit(root),
        },
    )


def next_attempt(run: str, submission_ids: Iterable[str], *, run_uri: str) -> int:
    """Return a number above all attempts of ``run`` that the cluster or the run's store knows.

    Where this machine can read the store, it is the number of the first attempt that the driver will begin,
    even on a new cluster.
    """
    pattern = re.compile(re.escape(run) + r"-a(\d+)")
    found = (pattern.fullmatch(name) for name in submission_ids)
    return 1 + max([_epoch_at(run_uri), *(int(match[1]) for match in found if match)])


def _epoch_at(run_uri: str) -> int:
    # a store that this machine cannot read is no reason to refuse the submission
    try:
        faults = reading_faults(run_uri, field="checkpoint.uri")
        return 0 if faults else newest_epoch(open_store(run_uri))
    except RaymegaError:
        return 0


def config_hash(job: Job) -> str:
    """Return a hash of all fields of the job, as twelve hex digits."""
    text = json.dumps(job.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def git_commit(folder: Path) -> str:
    """Return the git commit of ``folder``, with ``-dirty`` if files differ from it; ``none`` without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "none"


def absolute_overrides(job_file: Path, overrides: Iterable[str]) -> list[str]:
    """Return ``field=/absolute/path`` for each path field with a relative path, resolved against the cwd.

    Lists of datasets are given as a whole.
    """
    given, lists = _given_paths(job_file, overrides), _given_lists(job_file, overrides)
    return [
        *(f"{path}={_absolute(text)}" for path, text in given.items() if _is_relative(text)),
        *(
            f"{path}={json.dumps(with_absolute_paths(value))}"
            for path, value in lists.items()
            if with_absolute_paths(value) != value
        ),
    ]


def relative_path_faults(job_file: Path, overrides: Iterable[str]) -> list[Fault]:
    """Return a fault for each relative path: in a Ray job it would refer to the unpacked folder."""
    return [
        Fault(
            fact=f"{path}={text!r} is relative",
            rule="inside a Ray job the working folder is a copy that ends with the job and differs "
            "between nodes",
            remedy="give a URI or an absolute path that every node sees, or use `raymega submit`, "
            "which resolves it on your machine",
        )
        for path, text in [
            *_given_paths(job_file, overrides).items(),
            *_entries(_given_lists(job_file, overrides)),
        ]
        if _is_relative(text) and not text.startswith("~")
    ]


def credential_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each URI with credentials, which would appear in logs, MLflow and the dashboard."""
    return [
        Fault(
            fact=f"{path} holds a user name or password",
            rule="a job's fields are shown in logs, in MLflow and on the dashboard",
            remedy="take it out of the URI; give credentials by the environment, a profile or the "
            "node's role (MLFLOW_TRACKING_USERNAME and _PASSWORD, AWS_PROFILE)",
        )
        for path, value in [*values.items(), *_dataset_uris(values)]
        if isinstance(value, str) and "://" in value and _has_credentials(value)
    ]


def _dataset_uris(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield place and path of each dataset in the job's lists of datasets."""
    for path in PATH_LISTS:
        plain = tuple(entry.model_dump() for entry in values.get(path, ()))
        yield from _entries(plain, path)


def working_dir_faults(root: Path) -> Iterator[Fault]:
    """Return a fault that names the largest entries if the folder is too large to ship."""
    sizes = shipped_sizes(root)
    total = sum(sizes.values())
    if total <= MAX_WORKING_DIR_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NUM_NAMED]
    named = ", ".join(f"{name} ({_mib(sizes[name])})" for name in largest)
    yield Fault(
        fact=f"working folder {str(root)!r} holds {_mib(total)}, most of it in {named}",
        rule=f"Ray ships at most {_mib(MAX_WORKING_DIR_BYTES)}, less what .gitignore and "
        ".rayignore name",
        remedy="add data, checkpoints and results to .rayignore, or use another --working-dir",
    )


def shipped_sizes(root: Path) -> dict[str, int]:
    """Return the bytes that Ray would ship, by the name of the entry directly below ``root``."""
    sizes: dict[str, int] = {}

    def add(path: Path) -> None:
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(root).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size

    # Ray's own walk, which applies .gitignore and .rayignore
    walk_shipped_files(root, add)
    return sizes


def _command(root: Path) -> list[str]:
    """Return the repository's script if it is shipped, else the command that is installed on the nodes."""
    return ["python", SCRIPT] if (root / SCRIPT).is_file() else ["raymega", "train"]


def _job_file_faults(job_file: Path, root: Path) -> Iterator[Fault]:
    if not job_file.resolve().is_relative_to(root):
        yield Fault(
            fact=f"job file {str(job_file)!r} lies outside the working folder {str(root)!r}",
            rule="the nodes see only what the working folder holds",
            remedy="move it there, or give its folder as --working-dir",
        )


def _given_paths(job_file: Path, overrides: Iterable[str]) -> dict[str, str]:
    """Return the path fields as written in file and overrides; none if the file is unreadable."""
    try:
        raw = read_yaml(job_file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    # the file's values; the job is not validated yet, so sections may have any type
    given: dict[str, str] = {}
    for path in PATH_FIELDS:
        section, _, key = path.partition(".")
        fields = raw.get(section) if isinstance(raw, dict) else None
        value = fields.get(key) if isinstance(fields, dict) else None
        if isinstance(value, str):
            given[path] = value
    # overrides win over the file
    for override in overrides:
        path, _, text = override.partition("=")
        if path.strip() in PATH_FIELDS:
            given[path.strip()] = text.strip()
    return given


def _given_lists(job_file: Path, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the lists of datasets in file and overrides; none if either is unreadable."""
    try:
        raw = read_yaml(job_file.read_text(encoding="utf-8"))
        texts = dict(override.split("=", 1) for override in overrides if "=" in override)
        given = {path: read_yaml(texts[path]) for path in PATH_LISTS if path in texts}
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    section = raw.get("data") if isinstance(raw, dict) else None
    found = (
        {f"data.{key}": value for key, value in section.items()}
        if isinstance(section, dict)
        else {}
    )
    return {path: found[path] for path in PATH_LISTS if path in found} | given


def _entries(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield place and text of each ``path`` inside lists and mappings."""
    if isinstance(value, tuple):
        for number, entry in enumerate(value):
            yield from _entries(entry, f"{place}[{number}]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            where = f"{place}.{key}" if place else key
            if key == "path" and isinstance(inner, str):
                yield where, inner
            yield from _entries(inner, where)


def _is_relative(text: str) -> bool:
    # sqlite:///file.db is relative, sqlite:////file.db absolute
    if text.startswith(SQLITE):
        return not text.startswith(SQLITE + "/")
    return text not in WORDS and absolute_path(text) != text


WORDS = frozenset({"run", "off"})
"""Values of path fields that are not paths, beside those of `absolute_path`."""


def _absolute(text: str) -> str:
    prefix = SQLITE if text.startswith(SQLITE) else ""
    return prefix + absolute_path(text.removeprefix(prefix))


def _has_credentials(uri: str) -> bool:
    parts = urlsplit(uri)
    return parts.username is not None or parts.password is not None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
    )
    return done.stdout.strip()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
