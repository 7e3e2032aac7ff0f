"""Three ways to keep a rank's share in the memory of two nodes, on a Ray cluster of three raylets.

snapshot servers: what snapshots do; a copy in memory that the own node's snapshot server maps, and one sent to the partner's by Arrow
Flight. plasma: `ray.put`, and an actor on either node that holds a view of its node's object store. calls: the first
copy as with snapshot servers, the second sent by calls of an actor that lays pieces into pages of its own.

Prints seconds until both copies are there and until another node has read one back, the host memory of two
generations in turn, in shares, and what a store does in which plasma has less room than two generations.

    python -m benchmarks.node_memory [--quick] [--mib 512] [--rounds 6]
"""

from __future__ import annotations

import argparse
import json
import time
from mmap import mmap
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import ray
from isal.isal_zlib import crc32
from ray.cluster_utils import Cluster

from benchmarks.measure import median
from raymega.orchestrate.workers.snapshot_holders import SnapshotServerActor
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.shared_memory import SharedMemories
from tests.support.snapshot_servers import memory_of

MIB = 2**20
TOKEN = "benchmark"
WAYS = ("snapshot servers", "plasma", "calls")
PIECE_BYTES, READ_BYTES = 4 * MIB, 16 * MIB
CALLS_IN_FLIGHT = 4
HOME, PARTNER, OTHER = range(3)


class Holder:
    """An actor that keeps objects: as views of plasma, or in pages of its own."""

    def __init__(self):
        self._kept = {}

    def hold(self, key, values):
        self._kept[key] = values

    def fill(self, key, num_bytes, start, piece):
        if key not in self._kept:
            self._kept[key] = np.frombuffer(mmap(-1, num_bytes), np.uint8)
        self._kept[key][start : start + len(piece)] = piece

    def read(self, key, start, num_bytes):
        return self._kept[key][start : start + num_bytes]

    def drop(self, key):
        self._kept.pop(key, None)


class Rank:
    """Rank with a part of the state, and a buffer to read it back into."""

    def __init__(self, num_bytes, addresses):
        self._share = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
        self._back = np.zeros(num_bytes, np.uint8)
        self._shared, self._hosts = SharedMemories(), {}
        self._home, self._partner = (
            RemoteMemoryStore(addresses[at], TOKEN, shared=shared)
            for at, shared in ((HOME, self._shared), (PARTNER, None))
        )
        self._partner.drop([])  # connected before anything is measured

    def store(self, way, number, holders):
        """Seconds until both nodes have it, and of these how long the share may not change."""
        began = time.perf_counter()
        key = f"{way}-{number}"
        if way == "plasma":
            # ray.put copies into plasma; afterwards the share may change
            ref = ray.put(self._share)
            stall_s = time.perf_counter() - began
            ray.get([holder.hold.remote(key, ref) for holder in holders])
            return time.perf_counter() - began, stall_s
        host = self._copied(number % 2)
        stall_s = time.perf_counter() - began
        self._home.put(key, [memoryview(host)], overwrite=True)
        if way == "snapshot servers":
            self._partner.put(key, [memoryview(host)], overwrite=True)
        else:
            self._call(holders[PARTNER], key, host)
        return time.perf_counter() - began, stall_s

    def read(self, way, number, holder):
        """Seconds, and the checksum of what came."""
        began, key = time.perf_counter(), f"{way}-{number}"
        # plasma moves whole objects between nodes, the others ranges
        size = self._back.nbytes if way == "plasma" else READ_BYTES
        for start in range(0, self._back.nbytes, size):
            if way == "snapshot servers":
                piece = self._partner.get(key, start=start, num_bytes=size)
                piece = np.frombuffer(piece, np.uint8)
            else:
                piece = ray.get(holder.read.remote(key, start, size))
            self._back[start : start + len(piece)] = piece
        return time.perf_counter() - began, crc32(self._back)

    def checksum(self):
        return crc32(self._share)

    def _copied(self, slot):
        if slot not in self._hosts:
            self._hosts[slot] = self._shared.allocate(self._share.nbytes)
        host = np.frombuffer(self._hosts[slot].pages, np.uint8)
        np.copyto(host, self._share)
        return host

    def _call(self, holder, key, host):
        calls = []
        for start in range(0, host.nbytes, PIECE_BYTES):
            piece = host[start : start + PIECE_BYTES]
            calls.append(holder.fill.remote(key, host.nbytes, start, piece))
            # bounded, so that pieces do not pile up in the caller's memory
            if len(calls) == CALLS_IN_FLIGHT:
                ray.get(calls.pop(0))
        ray.get(calls)


class Nodes:
    """The cluster, a snapshot server and a holder on each of its nodes, and ranks on the first and the last."""

    def __init__(self, num_bytes, *, plasma_bytes):
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.raylets = []
        for number in range(3):
            node = self._cluster.add_node(
                num_cpus=1, resources={f"node{number}": 1}, object_store_memory=plasma_bytes
            )
            self.raylets.append(node.all_processes["raylet"][0].process.pid)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="warning")
        # a resource of each node's own places its actors there
        spread = [{"resources": {f"node{number}": 0.01}, "num_cpus": 0} for number in range(3)]
        server, holder, rank = map(_actor_class, (SnapshotServerActor, Holder, Rank))
        self._servers = [server.options(**at).remote(TOKEN) for at in spread]
        self.addresses = ray.get([each.address.remote() for each in self._servers])
        self.holders = [holder.options(**at, max_concurrency=4).remote() for at in spread]
        self.rank, self.reader = (
            rank.options(**spread[at]).remote(num_bytes, self.addresses) for at in (HOME, OTHER)
        )
        self.checksum, _ = ray.get([each.checksum.remote() for each in (self.rank, self.reader)])

    def store(self, way, number):
        return ray.get(self.rank.store.remote(way, number, self.holders[:2]), timeout=300)

    def read(self, way, number):
        holder = self.holders[PARTNER]
        seconds, checksum = ray.get(self.reader.read.remote(way, number, holder))
        assert checksum == self.checksum, way
        return seconds

    def drop(self, way, number):
        key = f"{way}-{number}"
        for address in self.addresses:
            RemoteMemoryStore(address, TOKEN).drop([key])
        ray.get([holder.drop.remote(key) for holder in self.holders])

    def num_bytes(self):
        """Host memory of the raylets and all their processes."""
        return sum(map(_memory_of, [*self.raylets, *_children(set(self.raylets))]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ray.shutdown()
        self._cluster.shutdown()


def _actor_class(cls) -> Any:  # an actor class made at run time has no static type
    return ray.remote(cls)


def _memory_of(pid):
    try:
        return memory_of(pid)
    except OSError:  # it has ended
        return 0


def _children(parents):
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                yield int(entry.name)
        except OSError:
            continue


def seconds(num_bytes, rounds):
    """Ways in turn; the first round is not counted."""
    samples: dict[tuple[str, str], list[float]] = {
        (way, what): [] for way in WAYS for what in ("store_s", "stall_s", "read_s")
    }
    with Nodes(num_bytes, plasma_bytes=4 * num_bytes + 128 * MIB) as nodes:
        for number in range(rounds + 1):
            for way in WAYS if number % 2 else WAYS[::-1]:
                found = (*nodes.store(way, number), nodes.read(way, number))
                nodes.drop(way, number)
                for what, value in zip(("store_s", "stall_s", "read_s"), found, strict=True):
                    samples[way, what] += [value] if number else []
    for (way, what), values in samples.items():
        print(f"{num_bytes // MIB} MiB {way:8} {what:8} {median(values)}", flush=True)
    return {f"{way}_{what}": median(values).value for (way, what), values in samples.items()}


def memory(num_bytes, way, *, generations=6):
    """Shares at the peak of some snapshots, of which two are kept, after them, and when all are dropped."""
    with Nodes(num_bytes, plasma_bytes=4 * num_bytes + 128 * MIB) as nodes:
        # memory before any share is stored; a thread looks for the peak
        base, top, is_over = nodes.num_bytes(), [0], Event()

        def watch():
            while not is_over.wait(0.02):
                top.append(nodes.num_bytes())

        watcher = Thread(target=watch)
        watcher.start()
        for number in range(generations):
            nodes.drop(way, number - 2)
            nodes.store(way, number)
        is_over.set()
        watcher.join()
        standing = nodes.num_bytes()
        for number in range(generations):
            nodes.drop(way, number)
        left = [max(top), standing, nodes.num_bytes()]
    peak, standing, dropped = ((each - base) / num_bytes for each in left)
    print(f"{way:8} peak {peak:.1f}, then {standing:.1f}, dropped {dropped:.1f} shares", flush=True)
    return {f"{way}_peak_shares": peak, f"{way}_dropped_shares": dropped}


def little_room(num_bytes, way):
    """The second of two generations, where plasma has room for one and a half."""
    with Nodes(num_bytes, plasma_bytes=num_bytes * 3 // 2) as nodes:
        nodes.store(way, 0)
        store_s, stall_s = nodes.store(way, 1)
    print(f"{way:8} with little room: store {store_s:.2f} s, stall {stall_s:.2f} s", flush=True)
    return {f"{way}_little_room_s": store_s, f"{way}_little_room_stall_s": stall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="128 MiB")
    parser.add_argument("--mib", type=int, default=512, help="of a share")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    num_bytes = (128 if options.quick else options.mib) * MIB
    facts = seconds(num_bytes, options.rounds)
    for way in WAYS:
        facts |= memory(num_bytes // 2, way) | little_room(num_bytes // 2, way)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
