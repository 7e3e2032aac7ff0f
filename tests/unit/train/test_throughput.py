import resource
from types import SimpleNamespace

import pytest
import torch

from raymega.plan.flops import flops_per_token
from raymega.train import throughput
from raymega.train.throughput import (
    BusyTimeMeter,
    ThroughputMeter,
    memory_metrics,
    reset_peak_memory,
)
from tests.support.jobs import make_test_plan

CPU = torch.device("cpu")
ROWS = SimpleNamespace(context=20.0, efficiency=0.75)


def test_speed_is_of_the_run_and_of_one_worker_and_a_cpu_has_no_mfu():
    plan = make_test_plan("parallel.tp=2", "parallel.pp=2")
    found = ThroughputMeter(plan, CPU, ROWS).metrics(samples=40, seconds=0.5)
    tokens_per_s = 40 * plan.job.data.seq_len * 0.75 / 0.5
    assert found["train/tokens_per_s"] == tokens_per_s
    assert found["train/tokens_per_s_per_worker"] == tokens_per_s / 4
    flops = flops_per_token(plan.job.model, seq_len=ROWS.context)
    assert found["train/tflops_per_worker"] == pytest.approx(tokens_per_s / 4 * flops / 1e12)
    assert "train/mfu" not in found


def test_images_are_those_of_the_step():
    vision = "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 8, num_heads: 2, ffn_hidden_size: 8, image_token_id: 99}"
    meter = ThroughputMeter(make_test_plan(vision), CPU, ROWS)
    found = meter.metrics(samples=40, seconds=0.5, image_tokens=120, images=30.0)
    assert found["train/images_per_s"] == 60
    tokens = found["train/tokens_per_s"] * 0.5
    assert found["data/image_token_share"] == 120 / tokens
    text = ThroughputMeter(make_test_plan(), CPU, ROWS).metrics(samples=40, seconds=0.5)
    assert not any("image" in name for name in text)


def test_mfu_is_model_flops_over_the_devices_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    plan = make_test_plan("precision.dtype=bfloat16")
    meter = ThroughputMeter(plan, torch.device("cuda", 0), ROWS)
    found = meter.metrics(samples=40, seconds=0.5)
    assert found["train/mfu"] == pytest.approx(found["train/tflops_per_worker"] / 989)


def test_memory_of_a_cpu_is_that_of_its_process():
    reset_peak_memory(CPU)
    before = memory_metrics(CPU)
    block = torch.ones(2**24)  # 64 MiB
    after = memory_metrics(CPU)
    assert after["memory/allocated_bytes"] - before["memory/allocated_bytes"] > 0.9 * 2**26
    assert after["memory/peak_bytes"] >= 0.9 * after["memory/allocated_bytes"]
    del block


def test_bytes_in_use_are_the_pages_that_are_resident(monkeypatch, tmp_path):
    (tmp_path / "statm").write_text("9000 70 60 5 0 800 0\n")
    monkeypatch.setattr(throughput, "STATM", tmp_path / "statm")
    assert memory_metrics(CPU)["memory/allocated_bytes"] == 70 * resource.getpagesize()


def test_work_on_a_cpu_is_the_mean_time_of_a_step_less_its_waits(monkeypatch):
    clock = iter([10.0, 13.0, 20.0, 24.0])
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    waited = SimpleNamespace(seconds=5.0)
    meter = BusyTimeMeter(CPU, waited, SimpleNamespace(begin_step=lambda: None))
    with meter:
        waited.seconds += 1.0
    with meter:
        pass
    assert meter.pop_metrics() == {"worker/work_s": (3.0 - 1.0 + 4.0) / 2}
    assert meter.pop_metrics() == {"worker/work_s": 0.0}
