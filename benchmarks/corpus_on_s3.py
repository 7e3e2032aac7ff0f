"""A corpus of random tokens in an S3 service on this machine, for runs that read it through a cache of a twentieth.

The service is moto's, in memory and in a process of its own. Workers get its address from this process's environment,
which Ray's processes inherit. As a command it measures what a new attempt on a living node costs a rank before its first
step, where its process lives and where a spare takes its place: the requests to the store, and the time of a CPU, which a
loaded machine does not change.

    python -m benchmarks.corpus_on_s3 [--rounds 8]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
from botocore.client import BaseClient

from raymega.config.load import parse_job
from raymega.config.schema import Job
from raymega.data.arrow import ShardWriter
from raymega.data.format import META_FILE, DatasetMeta, SourceMeta, SplitMeta, encode_meta
from raymega.data.samples import known_datasets, open_samples
from raymega.plan.run_plan import make_plan
from raymega.storage.registry import open_store
from tests.support.jobs import VERIFY
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server

NUM_SHARDS, SHARD_TOKENS, VOCAB = 200, 8192, 256
CACHE_SHARE = 0.05
"""Share of the corpus that a node may keep; half of it is shuffled together."""
SETTLE_S = 0.5
"""Pause before a round, in which the threads of the one before end."""


@contextmanager
def corpus_on_s3() -> Iterator[list[str]]:
    """Yield the settings of a job that trains on the corpus; the service lives as long as the body."""
    with moto_server() as endpoint, exported(environment(endpoint)):
        uri = f"s3://{BUCKET}/tokens"
        with tempfile.TemporaryDirectory() as name:
            num_bytes = _write(Path(name))
            store = open_store(uri)
            for path in sorted(Path(name).rglob("*.*")):
                store.put(path.relative_to(name).as_posix(), [path.read_bytes()], overwrite=False)
        cache = int(CACHE_SHARE * num_bytes)
        yield [f"data.path={uri}", f"data.cache_bytes={cache}", f"data.shuffle_block_bytes={cache // 2}"]  # fmt: skip


def _write(folder: Path) -> int:
    """Write the dataset, and return the bytes of its shards."""
    random, shards = np.random.default_rng(0), []
    for index in range(NUM_SHARDS):
        with ShardWriter(folder, f"train/{index:06d}.arrow", dtype="uint16") as writer:
            writer.append(random.integers(0, VOCAB, SHARD_TOKENS).astype(np.uint16))
            shards.append(writer.close())
    split = SplitMeta(shards=tuple(shards), num_text_bytes=NUM_SHARDS * SHARD_TOKENS)
    source = SourceMeta(
        inputs=("random",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
    )
    meta = DatasetMeta(
        recipe={"tokenizer": "bytes"}, vocab_size=VOCAB, eod_id=0, dtype="uint16",
        splits={"train": split}, valid_entropy=0.0, source=source, version=2,
    )  # fmt: skip
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return sum(shard.num_bytes for shard in shards)


def show_attempt(name: str, settings: Sequence[str], *, rounds: int) -> None:
    """Print the CPU time and the requests of opening the data and reading the first step's rows, again and again."""
    job = parse_job(VERIFY, [*settings, "run.eval_samples=0"]).job()
    known = known_datasets(job)
    # the first round is that of a new node, and not counted
    living = [_attempt(job, known) for _ in range(rounds + 1)][1:]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        spares = [pool.submit(_spare, job, known).result() for _ in range(rounds)]
    for whose, found in (("a process that lives", living), ("a spare", spares)):
        opening, reading, requests = zip(*found, strict=True)
        print(
            f"{name}, {whose}: opened in {statistics.median(opening):.1f} ms of a CPU, rows in "
            f"{statistics.median(reading):.1f} ms, {sum(requests) / rounds:g} requests an attempt",
            flush=True,
        )


def _attempt(job: Job, known: Mapping[str, str]) -> tuple[float, float, int]:
    """Return the milliseconds of opening the data and of reading the first step's rows, and the requests."""
    ask = BaseClient._make_api_call
    time.sleep(SETTLE_S)
    with patch.object(BaseClient, "_make_api_call", autospec=True, side_effect=ask) as asked:
        began = time.process_time()
        samples = open_samples(job, known)
        opened = time.process_time()
        for sample in range(job.data.global_batch_size):
            samples.row(sample)
        read = time.process_time()
    return 1e3 * (opened - began), 1e3 * (read - opened), asked.call_count


def _spare(job: Job, known: Mapping[str, str]) -> tuple[float, float, int]:
    """Load what a spare loads ahead, then begin an attempt."""
    from raymega.train import entry  # torch, which drivers that import this module do without

    entry.load_lazy_parts(replace(make_plan(job), datasets=dict(known)), "cpu")
    return _attempt(job, known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory() as home,
        exported({"HOME": home}),
        corpus_on_s3() as settings,
    ):
        show_attempt("in an S3 service", settings, rounds=rounds)
        show_attempt("synthetic", [], rounds=rounds)


if __name__ == "__main__":
    main()
