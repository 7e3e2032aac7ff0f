"""cluster/on-premise.yaml brought up by `ray up` on five machines, and a run that loses two of them.

`desk` is where the user sits, `head` and three workers are the cluster. The run has one worker on
each of two machines; the third is spare.
"""

from __future__ import annotations

import os
import re

import yaml

from rehearsal.hosts import REPOSITORY, WORK, Host, Site
from rehearsal.script import Command, Record, run

ENVIRONMENT = ". raymega-env/bin/activate && cd raymega && export RAY_AUTH_MODE=token"
FILE = "~/site.yaml"
JOB_SERVER = "http://127.0.0.1:8265"
DESK, NUM_WORKERS = "10.77.0.2", 3
RAY_PROCESSES = "raylet|gcs_server|ray::|dashboard/|autoscaler/_private"


def rehearse(record: Record) -> None:
    """Rehearse everything: up, submit, lose a machine, lose a link, finish, down."""
    site = Site()
    try:
        _rehearse(site, record)
    finally:
        site.close()


def _rehearse(site: Site, record: Record) -> None:
    desk, head = site.add_host("desk", DESK), site.add_host("head", "10.77.0.10")
    workers = [site.add_host(f"worker{n}", f"10.77.0.1{n}") for n in range(1, NUM_WORKERS + 1)]
    desk.send_repository(site.image)
    _write_cluster_file(desk, head, workers)
    record.say(f"{len(site.hosts)} machines have booted")
    _bring_up(desk, head, record)
    with_tunnel(desk, record)
    # two losses: a crash, whose kernel resets connections, then a cut cable, which says nothing
    lost = _lose_machine(desk, workers, record)
    lost.boot(site.image)
    record.say(f"## {lost.name} has booted again")
    record.note("machine_is_back_s", wait_for_nodes(head, NUM_WORKERS + 1, record))
    lost = _lose_cable(desk, workers, record)
    lost.mend_link()
    record.say(f"## {lost.name}'s cable is plugged in again")
    record.note("cable_is_back_s", wait_for_nodes(head, NUM_WORKERS + 1, record))
    _bring_down(desk, [head, *workers], record)


def _write_cluster_file(desk: Host, head: Host, workers: list[Host]) -> None:
    """The shipped file; only addresses and their number differ."""
    config = yaml.safe_load((REPOSITORY / "cluster/on-premise.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [w.address for w in workers]}
    config["max_workers"] = len(workers)
    desk.run(f"cat > {FILE} <<'END'\n{yaml.safe_dump(config, sort_keys=False, width=1000)}\nEND")


def _bring_up(desk: Host, head: Host, record: Record) -> None:
    run(desk, f"{ENVIRONMENT} && ray get-auth-token --generate > /dev/null", record, limit_s=60)
    started = record.now()
    run(desk, f"{ENVIRONMENT} && ray up --yes {FILE}", record, limit_s=300, is_shown=False)
    record.note("ray_up_s", record.now() - started)
    wait_for_nodes(head, NUM_WORKERS + 1, record)
    record.note("all_workers_joined_s", record.now() - started)


def wait_for_nodes(head: Host, number: int, record: Record) -> float:
    """Wait until that many nodes live, the head included; the seconds that took."""
    return record.wait(f"{number} nodes", lambda: alive_nodes(head) == number, limit_s=180)


def alive_nodes(head: Host) -> int:
    """Living nodes by Ray's own account."""
    # the head may not answer yet: no nodes, then, and another try
    shown = head.run(f"{ENVIRONMENT} && ray list nodes --filter state=ALIVE", is_checked=False)
    return int(re.findall(r"^Total: (\d+)", shown, re.MULTILINE)[0]) if "Total: " in shown else 0


def with_tunnel(desk: Host, record: Record) -> None:
    """The documented way to the job server, which listens on the head's loopback only."""
    Command(desk, f"{ENVIRONMENT} && ray dashboard {FILE}", record, is_shown=False)
    # the tunnel runs on in the background: it is open when a connection is taken
    probe = "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 8265), 1)\""
    record.wait("tunnel", lambda: "Error" not in desk.run(probe, is_checked=False), limit_s=60)


def submit(desk: Host, record: Record, settings: dict[str, float]) -> Command:
    """Submit the small job with one worker a machine, through the tunnel, and wait for a step."""
    settings = {
        "checkpoint.uri": "/mnt/store/runs", "checkpoint.every": 10,
        "elastic.collective_timeout_s": 60.0,
        "data.global_batch_size": 4, **settings,
    }  # fmt: skip
    words = " ".join(f"--set {key}={value}" for key, value in settings.items())
    command = f"raymega submit jobs/verify.yaml --address {JOB_SERVER} --follow {words}"
    started = record.now()
    job = Command(desk, f"{ENVIRONMENT} && {command}", record)
    record.note("first_step_s", job.wait_for(r"^step ", limit_s=180) - started)
    return job


def _lose_machine(desk: Host, workers: list[Host], record: Record) -> Host:
    """A machine that holds a worker crashes; its kernel still resets connections."""
    job = submit(desk, record, {"run.steps": 40, "cluster.cpus_per_worker": os.cpu_count()})
    wait_for_checkpoint(10, record)
    at_work = holders(workers)
    record.note("crash_machines_at_work", len(at_work))
    lost = at_work[-1]
    record.say(f"## {lost.name} crashes")
    lost.crash()
    measure_recovery(job, "crash", record)
    record.note("crash_run_exit_code", job.end(limit_s=300))
    return lost


def _lose_cable(desk: Host, workers: list[Host], record: Record) -> Host:
    """Resume the run for more steps, and cut the link of a machine: no connection to it is reset."""
    job = submit(desk, record, {"run.steps": 80, "cluster.cpus_per_worker": os.cpu_count()})
    wait_for_checkpoint(50, record)
    at_work = holders(workers)
    record.note("cut_machines_at_work", len(at_work))
    lost = at_work[-1]
    record.say(f"## {lost.name}'s cable is pulled")
    lost.cut_link()
    measure_recovery(job, "cut", record)
    record.note("cut_run_exit_code", job.end(limit_s=300))
    record.note("cut_machine_still_computes", len(lost.processes("ray::Worker")))
    return lost


def wait_for_checkpoint(step: int, record: Record) -> None:
    """Wait for it in the store itself: the driver's log comes a second late."""
    folder = WORK / f"store/runs/verify/checkpoints/step-{step:08d}"
    record.wait(f"{folder}", lambda: any(folder.glob("manifest-*")), limit_s=240)


def measure_recovery(job: Command, fault: str, record: Record) -> None:
    """Note the seconds from now until the driver detects the fault, finishes a step, and has recovered."""
    at = record.now()
    # by the lines that a user sees, in the order in which they must come
    noticed = job.wait_for(r"^Attempt \d+ failed", after_s=at, limit_s=120)
    stepped = job.wait_for(r"^step ", after_s=noticed, limit_s=240)
    recovered = job.wait_for(r"^Recovered", after_s=noticed, limit_s=240)
    record.note(f"{fault}_noticed_s", noticed - at)
    record.note(f"{fault}_first_step_s", stepped - at)
    record.note(f"{fault}_recovered_s", recovered - at)


def holders(workers: list[Host]) -> list[Host]:
    """Machines with a worker of the run."""
    return [host for host in workers if host.processes("ray::Worker")]


def _bring_down(desk: Host, hosts: list[Host], record: Record) -> None:
    started = record.now()
    run(desk, f"{ENVIRONMENT} && ray down --yes {FILE}", record, limit_s=120, is_shown=False)
    record.note("ray_down_s", record.now() - started)
    empty = lambda: not any(host.processes(RAY_PROCESSES) for host in hosts)  # noqa: E731
    record.wait("no Ray process left", empty, limit_s=300)
    record.note("nothing_left_running_s", record.now() - started)
