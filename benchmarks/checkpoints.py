"""Saving and loading a checkpoint against torch, memcpy and the store itself: several ranks, one state.

Every rank holds its rows of the same tensors. What is compared saves or loads the same bytes, in turn, with as many
threads; a figure is what the slowest rank took, the median of the rounds. The first save, which takes memory, is
reported apart.

    python -m benchmarks.checkpoints [--quick] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raymega.box import Box
from raymega.checkpoint.format.manifest import commit, read_manifest
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.ranged_reads import LOCAL_BYTES, NUM_FETCHES
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.parallel.comm.world import open_world
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.storage.local import LocalStore

CPU = torch.device("cpu")
KINDS = ("model", "adam.exp_avg", "adam.exp_avg_sq")
WIDTH, FFN, VOCABULARY = 1024, 4096, 8192
TIMEOUT_S = 600.0
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the measurements."""

    folder: str
    ranks: int
    layers: int
    rounds: int


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A Llama-like model without its names."""
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        found |= {f"layers.{layer}.{part}": (WIDTH, WIDTH) for part in "qkvo"}
        found |= {f"layers.{layer}.up": (FFN, WIDTH), f"layers.{layer}.down": (WIDTH, FFN)}
        found[f"layers.{layer}.norm"] = (WIDTH,)
    return found


class State:
    """A rank's part: cut along ``dim`` of every matrix; each tensor has memory of its own."""

    def __init__(self, setting: Setting, rank: int, dim: int) -> None:
        self.dim = dim
        self.boxes = {
            f"{kind}/{name}": (shape, _part(shape, setting.ranks, rank, dim))
            for kind in KINDS
            for name, shape in shapes(setting.layers).items()
        }
        self.tensors = {
            name: (torch.arange(box.num_elements) % 16_777_213 + rank).float().view(box.shape)
            for name, (_, box) in self.boxes.items()
        }
        self.num_bytes = sum(values.nbytes for values in self.tensors.values())

    def like(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return one buffer of the state's size, and views of it with the shapes of the tensors."""
        flat = torch.zeros(self.num_bytes // 4)
        sizes = [values.numel() for values in self.tensors.values()]
        pieces = zip(flat.split(sizes), self.tensors.values(), strict=True)
        return flat, [piece.view(values.shape) for piece, values in pieces]

    def blocks(self) -> list[TensorBlock]:
        """Return the state as raymega's optimizer yields it."""
        return [
            TensorBlock(
                kind=name.partition("/")[0], tensor=_tensor(name.partition("/")[2], shape), box=box,
                values=self.tensors[name], is_primary=True,
            )
            for name, (shape, box) in self.boxes.items()
        ]  # fmt: skip

    def dtensors(self, mesh) -> dict[str, DTensor]:
        """Return the state as DTensors over the same memory."""
        return {
            name: DTensor.from_local(
                values, mesh, [Shard(min(self.dim, values.ndim - 1))], run_check=False
            )
            for name, values in self.tensors.items()
        }


def _part(shape: tuple[int, ...], ranks: int, rank: int, dim: int) -> Box:
    # vectors are cut along their only dimension
    dim = min(dim, len(shape) - 1)
    extent = shape[dim] // ranks
    offset = tuple(extent * rank if at == dim else 0 for at in range(len(shape)))
    return Box(offset=offset, shape=tuple(extent if at == dim else n for at, n in enumerate(shape)))


def _tensor(name: str, shape: tuple[int, ...]) -> GlobalTensor:
    return GlobalTensor(
        name=name, shape=shape, tp_dim=0, init="zeros", initializer_range=0.0, role="matrix"
    )


class Rank:
    """Measurements of one rank; all ranks call each timed method at the same time."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank = setting, rank
        self.root = Path(setting.folder)
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.memory: dict[str, float] = {}
        self.rss_before = _status("VmRSS")
        self.state = State(setting, rank, 0)
        self.num_bytes = self.state.num_bytes
        self.mesh = init_device_mesh("cpu", (setting.ranks,))
        self.theirs = self.state.dtensors(self.mesh)
        self.target, self.places = self.state.like()
        self.shards: list = []
        self.writer = CheckpointWriter(
            LocalStore(self.root / "ours"), rank=rank, attempt=1, report=self.shards.append
        )
        # What async_save makes anew for each save; kept, it reuses its memory as ours does.
        self.stager = DefaultStager(StagingOptions(*[False] * 4))
        # key of the newest manifest, which all ranks load
        self.key = ""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the body, from a barrier on; the maximum over ranks is taken at the end."""
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Peak memory beyond what the process has already."""
        dist.barrier()
        # 5 resets VmHWM, the kernel's peak of this process
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        yield
        self.memory.setdefault(name, (_status("VmHWM") - before) / self.num_bytes)

    def memcpy(self, _number: int) -> None:
        with self.timed("stall: memcpy"):
            for place, values in zip(self.places, self.state.tensors.values(), strict=True):
                place.copy_(values)

    def save_ours(self, number: int) -> None:
        self.shards.clear()
        with self.timed("save: ours"):
            with self.timed("stall: ours"):
                self.writer.save(number, self.state.blocks(), {"step": number})
            # training would continue here: what follows is saved in the background
            self.writer.wait()
            # the driver's part: collect what each rank wrote, and commit one manifest
            reports = [None] * self.setting.ranks if self.rank == 0 else None
            dist.gather_object(self.shards[-1], reports)
            if self.rank == 0:
                self._commit(reports)
            dist.barrier()
        # every rank needs the key to load the round's checkpoint
        key = [self.key]
        dist.broadcast_object_list(key)
        self.key = key[0]

    def _commit(self, reports) -> None:
        manifest = assemble(
            reports, world_size=self.setting.ranks, attempt=1, created="", job={}, grid={}
        )
        self.key = commit(LocalStore(self.root / "ours"), manifest)

    def save_torch(self, number: int) -> None:
        path = self.root / f"torch-{number}-{self.rank}.pt"
        with self.timed("stall: torch.save"):
            torch.save(self.state.tensors, path)
        # torch.save leaves bytes in the page cache; ours and DCP's are on the disk
        _sync(path)
        path.unlink()

    def save_dcp(self, number: int) -> None:
        with self.timed("save: DCP"):
            dcp.save(self.theirs, checkpoint_id=str(self.root / f"dcp-{number}"))

    def save_async(self, number: int, name: str, **options) -> None:
        with self.timed(f"save: {name}"):
            with self.timed(f"stall: {name}"):
                future = dcp.async_save(
                    self.theirs, checkpoint_id=str(self.root / f"async-{number}"), **options
                )
            future.result()

    def write_raw(self, number: int) -> None:
        path = self.root / f"raw-{number}" / str(self.rank)
        path.parent.mkdir(exist_ok=True)
        data = self.target.view(torch.uint8).numpy().data
        with self.timed("save: raw write"), path.open("wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def read_raw(self, number: int, name: str) -> None:
        """The rank's own bytes with as many threads and requests as ours."""
        path, target = self.root / f"raw-{number}" / str(self.rank), self.target.view(torch.uint8)
        place = memoryview(target.numpy())
        with self.timed(name), path.open("rb", buffering=0) as file:

            def read(start: int) -> None:
                rest = place[start : start + LOCAL_BYTES]
                while rest:
                    count = os.preadv(file.fileno(), [rest], start)
                    rest, start = rest[count:], start + count

            with ThreadPoolExecutor(NUM_FETCHES) as pool:
                list(pool.map(read, range(0, self.num_bytes, LOCAL_BYTES)))

    def load_ours(self, state: State, name: str) -> int:
        store = LocalStore(self.root / "ours")
        with self.timed(name):
            return load(store, read_manifest(store, self.key), state.blocks())

    def load_dcp(self, state: State, number: int, name: str) -> None:
        tensors = state.dtensors(self.mesh)
        with self.timed(name):
            dcp.load(tensors, checkpoint_id=str(self.root / f"dcp-{number}"))

    def share(self) -> None:
        """Time the all-gather that replicas would need if each read only its part of the state."""
        whole = self.target
        # one replica's part of the reads, then the exchange that would complete it
        part = whole.chunk(self.setting.ranks)[self.rank].clone()
        with self.timed("share: all-gather of as many bytes"):
            dist.all_gather_into_tensor(whole[: part.numel() * self.setting.ranks], part)

    def forget(self) -> None:
        """Take every file out of the page cache, so that a read comes from the disk."""
        dist.barrier()
        for path in self.root.rglob("*") if self.rank == 0 else ():
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        dist.barrier()

    def clear(self, number: int) -> None:
        """Remove what a round wrote."""
        dist.barrier()
        if self.rank == 0:
            for name in (f"dcp-{number}", f"async-{number}", f"raw-{number}", "ours"):
                shutil.rmtree(self.root / name, ignore_errors=True)
        dist.barrier()

    def run(self) -> dict[str, object]:
        """All rounds; the first one warms up."""
        self.first()
        for number in range(1, self.setting.rounds + 1):
            for turn in self._in_turn(number, [
                self.memcpy, self.save_ours, self.save_torch, self.save_dcp,
                lambda n: self.save_async(n, "DCP async"),
                lambda n: self.save_async(n, "DCP async, kept memory", async_stager=self.stager),
                self.write_raw,
            ]):  # fmt: skip
                turn(number)
            self.load_all(number)
            self.share()
            self.clear(number)
        return {
            "seconds": self.seconds, "cpu": self.cpu, "memory": self.memory, "num_bytes": self.num_bytes,
            "fetched": self.fetched,
        }  # fmt: skip

    @staticmethod
    def _in_turn(number: int, turns: list[Callable]) -> list[Callable]:
        return turns[number % len(turns) :] + turns[: number % len(turns)]

    def first(self) -> None:
        """First saves: what they take of time and memory."""
        with self.watched("save: ours"):
            self.save_ours(0)
        with self.watched("save: DCP"):
            self.save_dcp(0)
        with self.watched("save: DCP async"):
            self.save_async(0, "DCP async")
        with self.watched("save: DCP async, kept memory"):
            self.save_async(0, "DCP async, kept memory", async_stager=self.stager)
        # the same tensors cut along the other dimension, as after a change of grid
        self.resharded = State(self.setting, self.rank, 1)
        self.memcpy(0)
        self.write_raw(0)
        with self.watched("load: ours"):
            self.load_ours(self.state, "load: ours, cached")
        with self.watched("load: DCP"):
            self.load_dcp(self.state, 0, "load: DCP, cached")
        self.fetched = self.load_ours(self.resharded, "reshard: ours")
        self.check()
        self.clear(0)
        # the first round's times are reported apart, and not counted
        self.first_seconds = {name: values[0] for name, values in self.seconds.items()}
        self.memory |= {f"first {name}": s for name, s in self.first_seconds.items()}
        self.seconds.clear()
        self.cpu.clear()

    def check(self) -> None:
        """Assert that raymega's resharded load equals torch's."""
        ours = {name: values.clone() for name, values in self.resharded.tensors.items()}
        for values in self.resharded.tensors.values():
            values.fill_(0)
        self.load_dcp(self.resharded, 0, "reshard: DCP")
        same = [torch.equal(ours[name], values) for name, values in self.resharded.tensors.items()]
        assert all(same), "ours and torch's loads differ"

    def load_all(self, number: int) -> None:
        for state, name in ((self.state, "load"), (self.resharded, "reshard")):
            for how in ("cold", "cached"):
                turns = [
                    lambda s=state, n=f"{name}: ours, {how}": self.load_ours(s, n),
                    lambda s=state, n=f"{name}: DCP, {how}": self.load_dcp(s, number, n),
                    lambda n=f"{name}: raw read, {how}": self.read_raw(number, n),
                ]
                for turn in self._in_turn(number, turns):
                    if how == "cold":
                        self.forget()
                    turn()


def _status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def measure(rank: int, setting: Setting, results) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(setting.folder) / "rendezvous"), setting.ranks)
    open_world(
        rank=rank, world_size=setting.ranks, rendezvous="", store=store, timeout_s=TIMEOUT_S, device=CPU
    )  # fmt: skip
    results.put((rank, Rank(setting, rank).run()))
    dist.barrier()
    dist.destroy_process_group()


def spread(setting: Setting) -> list[dict]:
    """Results of all ranks, each a process of its own."""
    # spawned, as forked processes would share the pages whose memory is measured
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, setting, results))
        for rank in range(setting.ranks)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, dict[str, float]] = {}
    while len(found) < setting.ranks:
        with suppress(queue.Empty):
            rank, row = results.get(timeout=1.0)
            found[rank] = row
        # a failed rank would leave the others in a barrier until the timeout
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.kill()
            raise SystemExit("a rank failed; its error is above")
    for rank in ranks:
        rank.join()
    return [found[rank] for rank in sorted(found)]


class Report:
    """Medians of what the slowest rank took, and bars."""

    def __init__(self, rows: list[dict], rounds: int) -> None:
        self.ranks = len(rows)
        self.total_mib = sum(row["num_bytes"] for row in rows) / MIB
        # a round takes as long as its slowest rank; CPU seconds of all ranks add up
        self.seconds, self.cpu = (
            {
                name: statistics.median(fold(row[clock][name][i] for row in rows) for i in range(rounds))
                for name in rows[0][clock]
            }
            for clock, fold in (("seconds", max), ("cpu", sum))
        )  # fmt: skip
        self.memory = {name: max(row["memory"][name] for row in rows) for name in rows[0]["memory"]}
        self.excess = max(row["fetched"] / row["num_bytes"] for row in rows)

    def show(self) -> None:
        for name, seconds in sorted(self.seconds.items()):
            rate = self.total_mib / seconds
            cpu = 1e3 * self.cpu[name]
            print(
                f"{name:34} {1e3 * seconds:10.1f} ms {rate:10.0f} MiB/s {cpu:10.1f} ms of CPU, all ranks"
            )
        for name, value in self.memory.items():
            unit = "s" if name.startswith("first ") else "x own bytes, peak beyond before"
            print(f"{name if unit == 's' else f'memory of first {name}':46} {value:8.3f} {unit}")
        print(f"{'bytes fetched to reshard':46} {self.excess:8.3f} x own bytes")

    def bars(self) -> list[tuple[str, float, float, bool]]:
        """Name, value, bound, and whether the value may be larger than the bound."""
        s = self.seconds
        # torch's better way is the one to beat
        fastest_async = min(s["stall: DCP async"], s["stall: DCP async, kept memory"])
        rows = [
            ("stall / memcpy", s["stall: ours"] / s["stall: memcpy"], 1.3, False),
            ("stall / DCP async's", s["stall: ours"] / fastest_async, 0.5, False),
            ("stall / torch.save's", s["stall: ours"] / s["stall: torch.save"], 1.0, False),
            ("raw write / save", s["save: raw write"] / s["save: ours"], 0.8, True),
            ("DCP save / save", s["save: DCP"] / s["save: ours"], 1.0, True),
            ("memory of a save", self.memory["save: ours"], 1.1, False),
        ]
        # A replica that shares reads its part of the bytes and gets the rest from the others.
        shared = s["load: ours, cached"] / self.ranks + s["share: all-gather of as many bytes"]
        rows.append(
            ("sharing replicas / load, cached", shared / s["load: ours, cached"], 1.0, True)
        )
        for how in ("cold", "cached"):
            ours = s[f"load: ours, {how}"]
            rows += [
                (f"raw read / load, {how}", s[f"load: raw read, {how}"] / ours, 0.8, True),
                (f"DCP load / load, {how}", s[f"load: DCP, {how}"] / ours, 1.0, True),
                (
                    f"DCP reshard / reshard, {how}",
                    s[f"reshard: DCP, {how}"] / s[f"reshard: ours, {how}"], 1.0, True,
                ),
            ]  # fmt: skip
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, a small state, two rounds")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="8 are 1.2 GiB of state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None, help="on the disk that is to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        setting = Setting(
            folder=folder,
            ranks=2 if options.quick else options.ranks,
            layers=1 if options.quick else options.layers,
            rounds=2 if options.quick else options.rounds,
        )
        rows = spread(setting)
    report = Report(rows, setting.rounds)
    print(
        f"{setting.ranks} ranks on {os.cpu_count()} cores, {report.total_mib:.0f} MiB of state, "
        f"{setting.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    report.show()
    for name, value, bound, is_floor in report.bars():
        is_met = value >= bound if is_floor else value <= bound
        sign = ">=" if is_floor else "<="
        print(f"{name:34} {value:8.3f}   bar {sign} {bound:g}   {'met' if is_met else 'MISSED'}")
    print(
        json.dumps(
            {
                "seconds": report.seconds,
                "cpu": report.cpu,
                "memory": report.memory,
                "excess": report.excess,
            }
        )
    )


if __name__ == "__main__":
    main()
