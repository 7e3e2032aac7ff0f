"""An entry module without torch: what workers run in tests of the driver on Ray.

Ranks really depend on each other: every step is one exchange with a hub that rank 0 hosts, so a
lost rank breaks the others' connections as a collective would. Faults stand in the run's name,
``demo.kill-2-7``: rank 2 kills itself before step 7 of the first attempt. Faults are kill, raise,
stop (SIGSTOP), hang, nan (every attempt) and bug (every attempt).
"""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Listener

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.keys import data_file, folder_of
from raymega.checkpoint.format.manifest import read_manifest
from raymega.errors import CommunicationError, NumericsError
from raymega.events import EvaluationFinished, StepFinished
from raymega.messages import Entered, Progress, ShardSaved, WorkerFinished
from raymega.plan.run_plan import read_plan
from raymega.storage.registry import open_store

STEP_S = 0.02
KEY = b"test"
LINES = []


def warm_up(plan_json, device):
    pass


def host_rendezvous(host):
    listener = Listener((host, 0), backlog=64, authkey=KEY)
    return f"{host}:{listener.address[1]}", listener


def abort():
    """A thread that reads is woken by a shutdown; by a close it is not, unless the hub closes too."""
    for line in LINES:
        with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def run_worker(start, channel, rendezvous):
    plan = read_plan(start.plan_json)
    if start.rank == 0:
        # rank 0 has the hub, in a thread, and is one of its clients too
        args = (rendezvous, plan.grid.world_size)
        threading.Thread(target=_serve, args=args, daemon=True).start()
    host, _, port = start.rendezvous.rpartition(":")
    line = Client((host, int(port)), authkey=KEY)
    # abort finds the line here, as torch finds its world
    LINES[:] = [line]
    try:
        _enter(start, channel, line)
        step = _restored_step(start)
        _train(start, plan, channel, line, step)
    finally:
        line.close()


def _serve(listener, world_size):
    """The hub: hears every rank, answers every rank with whether any wants to stop."""
    lines = [listener.accept() for _ in range(world_size)]
    try:
        while True:
            wishes = [line.recv() for line in lines]
            for line in lines:
                line.send(any(wishes))
    except (EOFError, OSError):
        for line in lines:
            line.close()
        listener.close()


def _exchange(line, wish):
    try:
        line.send(wish)
        return line.recv()
    except (EOFError, OSError) as error:
        raise CommunicationError(f"the hub is gone: {error!r}") from error


def _enter(start, channel, line):
    # the phases that the driver waits for, each passed by all ranks together
    for phase in ("rendezvous", "built", "restored"):
        _exchange(line, False)
        channel.report(Entered(rank=start.rank, phase=phase, seconds=0.0))


def _restored_step(start):
    if not start.restore:
        return 0
    return read_manifest(open_store(start.run_uri), start.restore).step


def _train(start, plan, channel, line, step):
    job, stopped = plan.job, False
    print(f"training prints {start.rank}", flush=True)
    # a step: fault, work, agreement with the others, report, save
    while step < job.run.steps and not stopped:
        _suffer(start, job.run.name, step + 1)
        time.sleep(STEP_S)
        stopped = _exchange(line, channel.requests().stop)
        step += 1
        if start.rank == 0:
            metrics = {"train/loss": 1.0 / step, "train/step_time_s": STEP_S}
            channel.report(StepFinished(step=step, metrics=metrics))
        else:
            channel.report(Progress(rank=start.rank, step=step))
        if stopped or step == job.run.steps or step % job.checkpoint.every == 0:
            channel.report(_save(start, plan, step))
    if start.rank == 0:
        channel.report(EvaluationFinished(step=step, metrics={"eval/loss": 0.5}))
    channel.report(WorkerFinished(rank=start.rank, step=step, stopped=stopped))


def _suffer(start, name, step):
    # faults are in the run's name: run.KIND-RANK-STEP
    for fault in name.split(".")[1:]:
        kind, rank, at = fault.split("-")
        if (int(rank), int(at)) != (start.rank, step):
            continue
        if kind == "nan":
            raise NumericsError(f"step {step}: loss=nan")
        if kind == "bug":
            raise ValueError("a mistake in the training code")
        # other kinds strike once, or no attempt would get past the step
        if start.attempt == 1:
            _suffer_once(kind)


def _suffer_once(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise":
        raise ValueError("a passing error")
    if kind == "hang":
        print("it hangs", flush=True)
        threading.Event().wait()


def _save(start, plan, step):
    name = data_file(attempt=start.attempt, rank=start.rank)
    # a real file of eight bytes: commits look whether files are there
    open_store(start.run_uri).put(folder_of(step) + name, [b"12345678"], overwrite=True)
    box = SavedBox(
        tensor="model/weight",
        dtype="float64",
        global_shape=(plan.grid.world_size,),
        box=Box(offset=(start.rank,), shape=(1,)),
        file=name,
        start=0,
        num_bytes=8,
        crc32=0,
    )
    state = {"step": step, "samples": 0, "tokens": 0}
    return ShardSaved(
        rank=start.rank,
        step=step,
        boxes=(box,),
        state=state,
        stall_s=0.001,
        write_s=0.002,
        num_bytes=8,
    )
