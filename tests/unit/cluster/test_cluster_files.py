"""The cluster files as far as no cloud is needed: Ray's validator, EC2's own model, our own rules."""

import copy
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import botocore.session
import jsonschema
import pytest
import typer
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from raymega.cli.main import app

FOLDER = Path(__file__).parents[3] / "cluster"
RAY_UP = ["aws", "gcp", "on-premise"]
CLOUDS = ["aws", "gcp"]
START = ("head_start_ray_commands", "worker_start_ray_commands")
AUTH = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token"

# What instances.insert takes at its first level, and what these files use of it below.
GCE_INSTANCE = {
    "type": "object",
    "required": ["machineType", "disks", "networkInterfaces", "serviceAccounts"],
    "additionalProperties": False,
    "properties": {
        "machineType": {"type": "string"},
        "disks": {
            "type": "array",
            "items": {
                "additionalProperties": False,
                "properties": {
                    "boot": {"type": "boolean"},
                    "autoDelete": {"type": "boolean"},
                    "type": {"enum": ["PERSISTENT", "SCRATCH"]},
                    "initializeParams": {
                        "additionalProperties": False,
                        "properties": {
                            "diskSizeGb": {"type": "integer"},
                            "sourceImage": {"pattern": "^projects/.*/global/images/"},
                        },
                    },
                },
            },
        },
        "networkInterfaces": {
            "type": "array",
            "items": {
                "required": ["subnetwork"],
                "additionalProperties": False,
                "properties": {
                    "nicType": {"enum": ["GVNIC", "VIRTIO_NET"]},
                    "network": {"type": "string"},
                    "subnetwork": {"pattern": "^projects/.*/regions/.*/subnetworks/"},
                },
            },
        },
        "serviceAccounts": {
            "items": {"required": ["email", "scopes"], "additionalProperties": False,
                      "properties": {"email": {}, "scopes": {"type": "array"}}},
        },
        "resourcePolicies": {"items": {"pattern": "^projects/.*/resourcePolicies/"}},
        "scheduling": {
            "additionalProperties": False,
            "properties": {
                "onHostMaintenance": {"enum": ["TERMINATE", "MIGRATE"]},
                "automaticRestart": {"type": "boolean"},
                "provisioningModel": {"enum": ["SPOT", "STANDARD"]},
                "instanceTerminationAction": {"enum": ["DELETE", "STOP"]},
            },
        },
    },
}  # fmt: skip


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def node_types(name):
    return read(name)["available_node_types"]


def ec2_faults(node_config):
    model = botocore.session.get_session().get_service_model("ec2")
    parameters = {"MinCount": 1, "MaxCount": 1, **node_config}
    if "SubnetIds" in parameters:  # Ray's own word, of which it passes one on
        parameters["SubnetId"] = parameters.pop("SubnetIds")[0]
    report = ParamValidator().validate(
        parameters, model.operation_model("RunInstances").input_shape
    )
    return report.generate_report()


@pytest.mark.parametrize("name", RAY_UP)
def test_rays_own_validator_accepts_the_file(name):
    validate_config(prepare_config(read(name)))


@pytest.mark.parametrize(
    "change",
    [{"max_wrokers": 1}, {"head_node_type": "nobody"}, {"max_workers": 1}],
    ids=lambda change: next(iter(change)),
)
def test_rays_own_validator_refuses_mistakes(change):
    with pytest.raises((jsonschema.ValidationError, ValueError, RuntimeError)):
        validate_config(prepare_config(read("aws") | change))


@pytest.mark.parametrize("kind", ["head", "gpu-on-demand", "gpu-spot"])
def test_ec2_accepts_the_nodes(kind):
    config = node_types("aws")[kind]["node_config"]
    assert ec2_faults(config) == ""
    broken = copy.deepcopy(config)
    broken["InstanceTyp"] = broken.pop("InstanceType")
    assert "InstanceTyp" in ec2_faults(broken)
    if "NetworkInterfaces" in config:
        broken = copy.deepcopy(config)
        broken["NetworkInterfaces"][3]["Interface"] = "efa"
        assert "NetworkInterfaces[3]" in ec2_faults(broken)


def test_efa_reaches_every_card_of_the_node_inside_one_placement_group():
    config = node_types("aws")["gpu-on-demand"]["node_config"]
    cards = config["NetworkInterfaces"]
    assert [card["NetworkCardIndex"] for card in cards] == list(range(32))
    assert [card["InterfaceType"] for card in cards] == ["efa"] + 31 * ["efa-only"]
    assert config["Placement"]["GroupName"]


@pytest.mark.parametrize("kind", ["head", "gpu-on-demand", "gpu-spot"])
def test_compute_engine_accepts_the_nodes(kind):
    jsonschema.validate(node_types("gcp")[kind]["node_config"], GCE_INSTANCE)


def test_gpudirect_has_an_interface_for_each_gpu_and_one_for_the_host():
    config = node_types("gcp")["gpu-on-demand"]["node_config"]
    assert len({nic["subnetwork"] for nic in config["networkInterfaces"]}) == 9
    assert config["resourcePolicies"]


@pytest.mark.parametrize("name", CLOUDS)
def test_head_is_on_demand_and_gpus_come_both_ways(name):
    types = node_types(name)
    assert "spot" not in str(types["head"]).lower()
    assert types["head"]["resources"] == {"CPU": 0}
    assert "SPOT" in str(types["gpu-spot"]["node_config"]).upper()
    assert "SPOT" not in str(types["gpu-on-demand"]["node_config"]).upper()
    assert {types[kind]["resources"]["GPU"] for kind in ("gpu-spot", "gpu-on-demand")} == {8}


@pytest.mark.parametrize("name", RAY_UP)
def test_every_start_carries_its_authentication_and_shows_no_dashboard(name):
    config = read(name)
    for key in START:
        assert AUTH in config[key][-1], key
        assert "--disable-usage-stats" in config[key][-1]
    head = config["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in head and "0.0.0.0" not in str(config)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", RAY_UP)
def test_health_checks_are_tuned_on_the_head(name):
    head = read(name)["head_start_ray_commands"][-1]
    settings = dict(re.findall(r"RAY_health_check_(\w+)=(\d+)", head))
    assert settings == {
        "initial_delay_ms": "5000", "period_ms": "1000", "timeout_ms": "1000",
        "failure_threshold": "5",
    }  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted(p for p in FOLDER.rglob("*") if p.suffix != ".pyc" and p.is_file()),
    ids=lambda path: path.name,
)  # fmt: skip
def test_no_file_holds_a_secret(path):
    text = path.read_text()
    assert not re.search(r"AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KEY|[0-9a-f]{64}", text)
    assert "RAY_AUTH_TOKEN=" not in text, "a token on a command line is seen by everyone"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_whole(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=100)
    assert path.stat().st_mode & 0o100, "executable"
    assert "set -euo pipefail" in path.read_text()


def test_set_up_installs_once_and_leaves_ray_on_the_path(tmp_path):
    """`ray down` runs a bare `ray stop`: where that is no command, everything stays up."""
    called = {name: f"echo {name} >> $HOME/called" for name in ("python", "pip", "raymega", "ray")}
    make_programs(tmp_path, **called)
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for _ in range(2):
        subprocess.run([FOLDER / "setup-node.sh"], env=env, check=True, timeout=100)
    down = ["bash", "--login", "-c", "source ~/.bashrc; ray stop"]
    subprocess.run(down, env=env, check=True, timeout=100)
    assert (tmp_path / "called").read_text().split() == ["pip", "raymega", "ray"]


def make_programs(folder, **scripts):
    """Programs on the path that a start command puts first."""
    programs = folder / "raymega-env" / "bin"
    programs.mkdir(parents=True)
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)


@pytest.mark.parametrize(
    ("name", "provider"), [("aws", "aws"), ("gcp", "gcp"), ("on-premise", "none")]
)
def test_node_agent_is_the_parent_of_every_workers_ray(name, provider, tmp_path):
    """The shell comes back at once, as `ray up` needs it, and what it has started stays."""
    make_programs(
        tmp_path, raymega='echo "$@" > $HOME/said; mv $HOME/said $HOME/words; exec sleep 10000'
    )
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "192.0.2.10"}
    agent = f"{read(name)['worker_start_ray_commands'][-1]} echo $! > $HOME/pid"
    subprocess.run(["bash", "-c", agent], env=env, check=True, timeout=100)
    pid, deadline_s = int((tmp_path / "pid").read_text()), time.monotonic() + 100
    try:
        while not (tmp_path / "words").exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        words = (tmp_path / "words").read_text().split()
    finally:
        os.killpg(pid, signal.SIGKILL)
    command, *options = words
    assert command == "node-agent" and options[: options.index("--")] == [
        "--address", "192.0.2.10:6379", "--provider", provider
    ]  # fmt: skip
    ray = options[options.index("--") + 1 :]
    assert ray[:4] == ["ray", "start", "--block", "--address=192.0.2.10:6379"]
    assert understood(options) == (provider, tuple(ray))


def understood(words):
    """What the command line itself makes of ``words``: whose notices, and the child's command."""
    command = typer.main.get_command(app).commands["node-agent"]
    with command.make_context("node-agent", list(words)) as context:
        return context.params["provider"], tuple(context.params["command"])


def test_every_host_of_ones_own_joins():
    """Ray's newer autoscaler counts the head as a worker of this kind of cluster."""
    head = read("on-premise")["head_start_ray_commands"][-1]
    assert "export RAY_enable_autoscaler_v2=0;" in head


def test_no_node_type_names_a_subnet_in_a_way_that_ray_overrides():
    for kind in node_types("aws").values():
        assert "SubnetId" not in kind["node_config"]
