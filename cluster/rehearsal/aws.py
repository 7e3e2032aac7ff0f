"""cluster/aws.yaml brought up by `ray up` against a stand-in for EC2, and a run that loses an instance.

What the file asks for is compared with what reaches the API. Instances boot as machines of namespaces
that offer the GPUs of their type by name only: the run computes on their CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from rehearsal.ec2 import REGION, SETTINGS, ZONE, Cloud
from rehearsal.hosts import REPOSITORY, Host, Site
from rehearsal.local import (
    DESK,
    ENVIRONMENT,
    FILE,
    measure_recovery,
    submit,
    wait_for_checkpoint,
    with_tunnel,
)
from rehearsal.script import Command, Record, run

# Lists whose names lose their plural on the wire.
WIRE = {"NetworkInterfaces": "NetworkInterface", "BlockDeviceMappings": "BlockDeviceMapping",
        "SecurityGroupIds": "SecurityGroupId", "Groups": "SecurityGroupId"}  # fmt: skip


def rehearse(record: Record) -> None:
    """Up, submit, lose an instance, get another one, finish, down."""
    site = Site()
    cloud = None
    try:
        desk = site.add_host("desk", DESK)
        cloud = Cloud(site, lambda: _public_key(desk))
        _rehearse(desk, cloud, record, site)
    finally:
        if cloud:
            cloud.close()
        site.close()


def _rehearse(desk: Host, cloud: Cloud, record: Record, site: Site) -> None:
    desk.send_repository(site.image)
    # the one difference to a real account: an endpoint beside the credentials
    desk.run(f"mkdir -p .aws && printf %s '{SETTINGS}' > .aws/config")
    file = _cluster_file(cloud.open_account())
    desk.run(f"cat > {FILE} <<'END'\n{yaml.safe_dump(file, sort_keys=False, width=1000)}\nEND")
    _bring_up(desk, cloud, record)
    record.note("requests_differ_from_file", "; ".join(differences(file, cloud.asked)))
    with_tunnel(desk, record)
    job = submit(desk, record, {"run.steps": 40, "cluster.cpus_per_worker": 192,
                                "cluster.capacity_timeout_s": 300.0})  # fmt: skip
    _lose_instance(job, cloud, record)
    record.note("run_exit_code", job.end(limit_s=240))
    started = record.now()
    run(desk, f"{ENVIRONMENT} && ray down --yes {FILE}", record, limit_s=180, is_shown=False)
    record.note("ray_down_s", record.now() - started)
    record.note("instances_left", len(cloud.instances()))
    record.note("instances_terminated", len(cloud.instances("terminated")))


def _cluster_file(account: dict[str, str]) -> dict:
    """The shipped file with the values that it marks as yours."""
    text = (REPOSITORY / "cluster/aws.yaml").read_text()
    for theirs, ours in {
        "ami-0123456789abcdef0": account["image"], "subnet-0123456789abcdef0": account["subnet"],
        "sg-0123456789abcdef0": account["group"],
    }.items():  # fmt: skip
        text = text.replace(theirs, ours)
    assert REGION in text and ZONE in text
    return yaml.safe_load(text)


def _public_key(desk: Host) -> str:
    """Return the public key of the key pair that `ray up` created."""
    return desk.run("cat $(ls .ssh/*.pem | head -1) | ssh-keygen -y -f /dev/stdin").strip()


def _bring_up(desk: Host, cloud: Cloud, record: Record) -> None:
    run(desk, f"{ENVIRONMENT} && ray get-auth-token --generate > /dev/null", record, limit_s=60)
    started = record.now()
    run(desk, f"{ENVIRONMENT} && ray up --yes {FILE}", record, limit_s=300, is_shown=False)
    record.note("ray_up_s", record.now() - started)
    record.wait("head and two GPU nodes", lambda: alive(cloud) == 3, limit_s=240)
    record.note("gpu_nodes_joined_s", record.now() - started)


def alive(cloud: Cloud) -> int:
    """Machines on which Ray runs."""
    return sum(bool(host.processes("raylet/raylet")) for host in cloud.living())


def _lose_instance(job: Command, cloud: Cloud, record: Record) -> None:
    """EC2 takes a GPU instance away, as it does with spot; the autoscaler gets another."""
    wait_for_checkpoint(10, record)
    # an instance that trains, not one that waits
    name = next(n for n, host in cloud.machines.items() if host.processes("ray::Worker"))
    record.say(f"## EC2 terminates {name}")
    cloud.client.terminate_instances(InstanceIds=[name])
    measure_recovery(job, "instance_lost", record)


def differences(file: dict, asked: list[dict[str, str]]) -> list[str]:
    """Return the settings of node_config that did not reach EC2, or reached it with another value."""
    found = []
    for request in asked:
        tags = {
            request[k]: request[k.replace("Key", "Value")] for k in request if k.endswith(".Key")
        }
        kind = tags["ray-user-node-type"]
        config = dict(file["available_node_types"][kind]["node_config"])
        if "SubnetIds" in config:  # Ray's own word: it picks one
            config["SubnetId"] = config.pop("SubnetIds")[0]
        wanted = dict(_flat(config))
        found += [
            f"{kind}: {k}={request.get(k)}, not {v}"
            for k, v in wanted.items()
            if request.get(k) != v
        ]
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A node_config as EC2's query protocol spells it: NetworkInterface.1.SubnetId=..."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{WIRE.get(key, key)}" if name else WIRE.get(key, key))
    elif isinstance(value, list):
        for number, item in enumerate(value, 1):
            yield from _flat(item, f"{name}.{number}")
    else:
        yield name, str(value).lower() if isinstance(value, bool) else str(value)
