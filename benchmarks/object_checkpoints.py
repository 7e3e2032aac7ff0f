"""Saving and loading a checkpoint in an S3 store against the store's own ceiling: several ranks, one state.

The ceiling is what the same ranks get with bare boto3: multipart uploads and ranged reads of as many bytes, in parts
and threads as ours. A figure is what the slowest rank took, the median of the rounds, which take turns. It starts a
Ceph of its own (its Debian packages must be there) unless AWS_ENDPOINT_URL_S3 and --uri name a store.

    python -m benchmarks.object_checkpoints [--quick] [--uri s3://BUCKET/PREFIX] [--ranks 4] [--layers 2]
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
import torch
import torch.distributed as dist
from botocore.config import Config

from benchmarks.checkpoints import MIB, Setting, State
from raymega.checkpoint.format.manifest import commit, read_manifest
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.ranged_reads import NUM_FETCHES, REMOTE_BYTES
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import ShardSaved
from raymega.plan.grid import Grid
from raymega.storage.registry import open_store
from raymega.storage.s3_multipart import PART_BYTES, PARTS_IN_FLIGHT
from tests.support.ranks import RankEnv, run_grid
from tests.support.servers.ceph_server import PACKAGES, CephServer, missing_programs
from tests.support.servers.s3_server import BUCKET, environment, exported, raw_client

BAR = 0.8


class Rank:
    """Measurements of one rank; all ranks call each timed method at the same time."""

    def __init__(self, rank: int, ranks: int, layers: int, uri: str) -> None:
        self.rank, self.ranks, self.uri = rank, ranks, uri
        self.state = State(Setting(folder="", ranks=ranks, layers=layers, rounds=0), rank, 0)
        # the raw side moves as many bytes, and reads into the same memory that it wrote from
        self.bytes = self.state.like()[0].view(torch.uint8).numpy().data
        self.store, self.key = open_store(uri), ""
        self.shards: list[ShardSaved] = []
        self.writer = CheckpointWriter(self.store, rank=rank, attempt=1, report=self.shards.append)
        self.bucket, _, self.prefix = uri.removeprefix("s3://").partition("/")
        self.client = boto3.client("s3", config=Config(
            # no checksums of boto3's own: the ceiling is the store's, not the client's
            max_pool_connections=16, request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ))  # fmt: skip
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        dist.barrier()
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def save(self, number: int) -> None:
        with self.timed("save"):
            self.writer.save(number, self.state.blocks(), {"step": number})
            self.writer.wait()
            # a save that failed would look fast
            assert not self.shards[-1].error, self.shards[-1].error
            reports = [None] * self.ranks
            dist.all_gather_object(reports, self.shards[-1])
            key = [None]
            if self.rank == 0:
                key[0] = commit(self.store, assemble(
                    reports, world_size=self.ranks, attempt=1, created="", job={}, grid={}
                ))  # fmt: skip
            dist.broadcast_object_list(key)
            self.key = key[0]

    def load(self, _number: int) -> None:
        with self.timed("load"):
            load(self.store, read_manifest(self.store, self.key), self.state.blocks())

    def write_raw(self, number: int) -> None:
        target = {"Bucket": self.bucket, "Key": f"{self.prefix}/raw-{number}-{self.rank}"}
        self.raw = target
        with self.timed("raw multipart put"), ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            upload = {
                **target,
                "UploadId": self.client.create_multipart_upload(**target)["UploadId"],
            }

            def send(at: int) -> dict[str, object]:
                # boto3 reads a body twice, for its signature and to send it: it must be seekable
                body = io.BytesIO(self.bytes[at : at + PART_BYTES])
                part = at // PART_BYTES + 1
                return {"PartNumber": part, "ETag": self.client.upload_part(
                    **upload, PartNumber=part, Body=body)["ETag"]}  # fmt: skip

            parts = list(pool.map(send, range(0, len(self.bytes), PART_BYTES)))
            self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def read_raw(self, _number: int) -> None:
        with self.timed("raw ranged get"), ThreadPoolExecutor(NUM_FETCHES) as pool:

            def read(at: int) -> None:
                end = min(at + REMOTE_BYTES, len(self.bytes))
                found = self.client.get_object(**self.raw, Range=f"bytes={at}-{end - 1}")
                self.bytes[at:end] = found["Body"].read()

            list(pool.map(read, range(0, len(self.bytes), REMOTE_BYTES)))

    def clear(self) -> None:
        dist.barrier()
        if self.rank == 0:
            for key in list(self.store.list("")):
                self.store.delete(key)
        dist.barrier()


def _measure(env: RankEnv, ranks: int, layers: int, uri: str, rounds: int) -> dict[str, object]:
    rank = Rank(env.rank, ranks, layers, uri)
    for number in range(rounds + 1):
        pairs = [(rank.save, rank.load), (rank.write_raw, rank.read_raw)]
        # sides in turn, each first in every second round; the first round is dropped
        for pair in pairs if number % 2 else reversed(pairs):
            for turn in pair:
                turn(number)
        rank.clear()
    return {
        "num_bytes": rank.state.num_bytes,
        "seconds": {k: v[1:] for k, v in rank.seconds.items()},
    }


@contextmanager
def _store(uri: str) -> Iterator[str]:
    if uri:
        yield uri
        return
    if missing := missing_programs():
        raise SystemExit(
            f"{', '.join(missing)} not installed; apt-get install {PACKAGES}, or name a store by --uri"
        )
    with tempfile.TemporaryDirectory() as folder:
        server = CephServer(Path(folder))
        try:
            server.start()
            with exported(environment(server.endpoint)):
                raw_client(server.endpoint).create_bucket(Bucket=BUCKET)
                yield f"s3://{BUCKET}/bench"
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, a small state, one round")
    parser.add_argument("--uri", default="", help="s3://BUCKET/PREFIX, which must be empty")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2, help="2 are 300 MiB of state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ranks, layers, rounds = (
        (2, 1, 1) if options.quick else (options.ranks, options.layers, options.rounds)
    )
    with _store(options.uri) as uri:
        rows = run_grid(_measure, Grid(dp=ranks), ranks, layers, uri, rounds, timeout=900)
    total = sum(row["num_bytes"] for row in rows) / MIB
    print(
        f"{ranks} ranks on {os.cpu_count()} cores, {total:.0f} MiB of state, {rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    median = {
        name: statistics.median(
            max(row["seconds"][name][at] for row in rows) for at in range(rounds)
        )
        for name in rows[0]["seconds"]
    }
    for name, seconds in median.items():
        print(f"{name:20} {1e3 * seconds:8.1f} ms {total / seconds:8.0f} MiB/s")
    for name, raw in (("save", "raw multipart put"), ("load", "raw ranged get")):
        ratio = median[raw] / median[name]
        print(
            f"{raw} / {name:6} {ratio:6.3f}   bar >= {BAR}   {'met' if ratio >= BAR else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
