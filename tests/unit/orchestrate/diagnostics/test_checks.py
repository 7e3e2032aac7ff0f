"""The doctor's judgement on facts that were made up: each problem is seen and has its remedy."""

import pytest

from raymega.messages import Entered
from raymega.orchestrate.cluster import node_probes
from raymega.orchestrate.cluster.node_probes import NodeFacts, Skew, version_fault
from raymega.orchestrate.diagnostics import checks
from raymega.orchestrate.diagnostics.checks import (
    check_clocks,
    check_gpus,
    check_versions,
    judge_bandwidth,
)

OWN = {"python": "3.11.7", "raymega": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
NAMES = {"a": "10.0.0.1", "b": "10.0.0.2"}


def node(gpus=(), driver="", **versions):
    return NodeFacts(versions=OWN | versions, gpus=tuple(gpus), driver=driver)


def problems(findings):
    found = [finding for finding in findings if finding.status == "problem"]
    assert all(finding.remedy for finding in found)
    return [finding.fact for finding in found]


@pytest.fixture
def told(monkeypatch):
    """What Ray was told of GPUs, by node."""

    def tell(**gpus):
        table = [{"NodeID": name, "Resources": {"GPU": float(n)}} for name, n in gpus.items()]
        monkeypatch.setattr(checks.ray, "nodes", lambda: table)

    return tell


def test_equal_versions_are_one_finding():
    (finding,) = check_versions(OWN, {"a": node(), "b": node()}, NAMES)
    assert finding.status == "ok" and "torch 2.13.0" in finding.fact


def test_other_versions_and_silent_nodes_are_named():
    facts = {"a": node(torch="2.14.0"), "b": TimeoutError("no answer in time")}
    first, second = problems(check_versions(OWN, facts, NAMES))
    assert "10.0.0.1 has torch 2.14.0; the driver has torch 2.13.0" in first
    assert "10.0.0.2 did not answer" in second


@pytest.mark.parametrize("what", OWN)
def test_every_version_counts(what):
    assert version_fault(OWN, "n", OWN) is None
    assert what in version_fault(OWN, "n", OWN | {what: "0"}).fact


def test_missing_gpu_and_mixed_gpus_are_problems(told):
    told(a=8, b=8)
    whole = node(gpus=["H100 81559 MiB"] * 8, driver="580.1")
    (finding,) = check_gpus({"a": whole, "b": whole}, NAMES)
    assert finding.status == "ok" and finding.fact == "16 x H100 81559 MiB, driver 580.1"
    fallen = node(gpus=["H100 81559 MiB"] * 7, driver="570.9")
    count, mixture = problems(check_gpus({"a": whole, "b": fallen}, NAMES))
    assert "10.0.0.2: nvidia-smi shows 7 GPUs; Ray offers 8" in count
    assert "drivers 570.9, 580.1" in mixture


def test_cpu_cluster_skips_gpus(told):
    told(a=0)
    (finding,) = check_gpus({"a": node()}, NAMES)
    assert finding.status == "skipped"


def test_clock_is_off_only_beyond_what_the_way_there_explains():
    skews = {"a": Skew(ahead_s=-5.0, error_s=0.1), "b": Skew(ahead_s=3.0, error_s=2.5)}
    (fact,) = problems(check_clocks(skews, NAMES))
    assert "10.0.0.1 is -5.0 s off" in fact


def test_bandwidth_is_the_buses_and_a_lagging_group_is_named():
    def timing(rank, seconds, ranks, axis="tp"):
        return Entered(rank=rank, phase=axis, seconds=seconds, detail=f"{10**9}:{ranks}")

    timings = [
        timing(0, 0.4, "0,1"), timing(1, 0.5, "0,1"), timing(2, 0.5, "2,3"), timing(4, 2.0, "4,5"),
        timing(0, 1.0, "0,2,4,6", axis="pp_forward"),
    ]  # fmt: skip
    links = {rank: ("a" if rank < 4 else "b", 450e9) for rank in range(6)}
    tp, slow, pp = judge_bandwidth(timings, links=links)
    assert tp.values == {
        "axis": "tp", "groups": 3, "message_bytes": 10**9, "bytes_per_s": 2e9,
        "slowest_bytes_per_s": 0.5e9, "link_bytes_per_s": 450e9,
    }  # fmt: skip
    assert pp.values["link_bytes_per_s"] == 0, "it spans nodes"
    assert "ranks 4,5 moves 0.500 GB/s" in slow.fact and slow.status == "problem"
    assert pp.values["axis"] == "pp" and pp.values["bytes_per_s"] == 1.5e9


def test_nvidia_smi_is_read_by_column(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.65.06'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = node_probes.node_facts()
    assert facts.gpus == ("NVIDIA H100 81559 MiB",) and facts.driver == "580.65.06"
    monkeypatch.setenv("PATH", "/nowhere")
    assert node_probes.node_facts().gpus == ()
