"""The Kubernetes files against the operator's own schema, made strict: no unknown key passes."""

import copy
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = {"kuberay-cluster": "rayclusters", "kuberay-job": "rayjobs"}
VARIABLE = "RAYMEGA_KUBERAY_CRDS"


def read(name):
    return yaml.safe_load((ROOT / "cluster" / f"{name}.yaml").read_text())


def cluster_spec(name):
    spec = read(name)["spec"]
    return spec.get("rayClusterSpec", spec)


@pytest.fixture(scope="module")
def validators():
    folder = Path(os.environ.get(VARIABLE, ROOT.parent / "shared" / "reference" / "kuberay"))
    if not folder.is_dir():
        pytest.skip(f"no KubeRay schemas at {folder}; name their folder in {VARIABLE}")
    return {name: _validator(folder / f"ray.io_{kind}.yaml") for name, kind in FILES.items()}


def _validator(path):
    versions = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft7Validator(_strict(schema))


def _strict(node):
    """Refuse what the API server would drop in silence."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    if node.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    has_keys = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if has_keys and not node.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


@pytest.mark.parametrize("name", FILES)
def test_operator_accepts_the_file(validators, name):
    faults = [f"{list(e.path)}: {e.message}" for e in validators[name].iter_errors(read(name))]
    assert faults == []


@pytest.mark.parametrize("name", FILES)
def test_mistakes_are_found_at_every_depth(validators, name):
    for break_it in (
        lambda spec: spec.update(raiVersion="1"),
        lambda spec: spec["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(imge="x"),
        lambda spec: spec["workerGroupSpecs"][1]["template"]["spec"].update(tolerations={}),
        lambda spec: spec["authOptions"].update(mode="open"),
    ):
        broken = copy.deepcopy(read(name))
        break_it(broken["spec"].get("rayClusterSpec", broken["spec"]))
        assert list(validators[name].iter_errors(broken)), break_it


@pytest.mark.parametrize("name", FILES)
def test_cluster_is_closed_and_every_pod_has_time_to_stop(name):
    spec = cluster_spec(name)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["networkPolicy"]["mode"] == "DenyAllIngress"
    head = spec["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP" and head["enableIngress"] is False
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [head, *spec["workerGroupSpecs"]]
    assert all(pod["template"]["spec"]["terminationGracePeriodSeconds"] >= 60 for pod in pods)


@pytest.mark.parametrize("name", FILES)
def test_node_agent_is_the_first_process_of_every_workers_pod(name, tmp_path):
    """It gets the pod's SIGTERM; the operator's own start of Ray is its child."""
    stub = tmp_path / "raymega"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done; echo $$\n')
    stub.chmod(0o755)
    ray = "ray start --block --address=head:6379 --num-gpus=8"
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RAY_ADDRESS": "head:6379",
        "KUBERAY_GEN_RAY_START_CMD": ray,
    }
    for group in cluster_spec(name)["workerGroupSpecs"]:
        template = group["template"]
        assert template["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
        (container,) = template["spec"]["containers"]
        command = [*container["command"], *container["args"]]
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        *words, pid = child.communicate(timeout=100)[0].splitlines()
        assert int(pid) == child.pid, "no shell stands between the pod and the agent"
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert words[: words.index("--")] == [
            "node-agent", "--address", "head:6379", "--provider", "none", "--grace-s", str(grace_s)
        ]  # fmt: skip
        assert words[words.index("--") + 1 :] == ["bash", "-c", f"exec {ray}"]


def test_job_waits_for_the_last_save_as_submit_does():
    env = yaml.safe_load(read("kuberay-job")["spec"]["runtimeEnvYAML"])["env_vars"]
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300 + 90


def test_both_files_describe_the_same_cluster():
    assert cluster_spec("kuberay-cluster") == cluster_spec("kuberay-job")
