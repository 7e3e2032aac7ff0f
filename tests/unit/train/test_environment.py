"""The worker's process: what run.deterministic sets, refuses and says."""

import os
from unittest.mock import patch

import pytest
import torch

from raymega.errors import ConfigError
from raymega.plan.memory.state_bytes import WORKSPACE_BYTES
from raymega.train.environment import _own_address, prepare_process, refused_operation
from tests.support.jobs import make_test_plan
from tests.support.ranks import run_alone

NAMES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def _settings(value, environment, device="cpu"):
    """What a worker's process is like afterwards, and what torch says to a varying kernel."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    plan = make_test_plan(f"run.deterministic={value}")
    with patch.object(torch.cuda, "set_device"):
        assert prepare_process(plan, device=device, local_rank=0).type == device
    error = ""
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as refused:
        error = str(refused_operation(refused))
    matmul = torch.backends.cuda.matmul
    return {
        "is_filled": torch.utils.deterministic.fill_uninitialized_memory,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": {name: os.environ.get(name) for name in NAMES},
        "error": error,
        "low_sums": (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ),
    }


def test_deterministic_run_sets_torch_cublas_and_nccl_and_names_what_is_refused():
    found = run_alone(_settings, "true", {}, "cuda")
    assert found["deterministic"] and not found["is_filled"]
    assert found["environment"] == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    assert "run.deterministic=true, and put_" in found["error"]
    assert "set run.deterministic=false" in found["error"]


def test_other_runs_set_none_of_it():
    found = run_alone(_settings, "false", {})
    assert not found["deterministic"] and found["error"] == ""
    assert set(found["environment"].values()) == {None}


def test_workspaces_of_a_gpu_are_what_the_plan_says():
    found = run_alone(_settings, "false", {}, "cuda")
    kib, number = map(int, found["environment"]["CUBLAS_WORKSPACE_CONFIG"].strip(":").split(":"))
    assert kib * 1024 * number == WORKSPACE_BYTES


def test_what_the_user_set_is_kept():
    found = run_alone(_settings, "true", {"NCCL_ALGO": "Tree"})
    assert found["environment"]["NCCL_ALGO"] == "Tree"


def test_torch_only_notes_errors_of_nccl_unless_the_user_wants_otherwise(monkeypatch):
    """What torch does by default and with these, `tests/cuda_books/lost_peer.py` shows."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "7")
    for name in ("set_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 1)
    assert prepare_process(make_test_plan(), device="cuda", local_rank=0) == torch.device("cuda", 0)
    assert [os.environ[name] for name in names] == ["0", "0"]
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "7"


@pytest.mark.parametrize("value", ["true", "false"])
def test_split_gemms_add_in_float32(value):
    assert run_alone(_settings, value, {})["low_sums"] == (False, False)


def test_other_errors_are_not_taken_for_a_refusal():
    assert refused_operation(RuntimeError("out of memory")) is None
    assert refused_operation(ValueError("")) is None
    text = "scatter_add_cuda_kernel does not have a deterministic implementation, but you set"
    error = refused_operation(RuntimeError(text))
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert "scatter_add_cuda_kernel" in str(error)


def test_own_address_is_that_of_the_route():
    assert _own_address("127.0.0.1", 9) == "127.0.0.1"
