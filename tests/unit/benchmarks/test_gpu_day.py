"""The GPU day without a GPU: it says so, and its functions agree with float64 on the CPU."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_day, gpu_parity, gpu_parts, gpu_rates, gpu_speed, gpu_verify

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@NO_CUDA
def test_without_a_gpu_it_ends_with_2_and_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--json", str(tmp_path / "gpu.json")])
    assert gpu_day.main() == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_each_part_has_a_function_and_each_half_fits_its_command():
    homes = (gpu_parts, gpu_rates, gpu_speed, gpu_verify)
    assert all(any(hasattr(at, f"measure_{name}") for at in homes) for name in gpu_day.PARTS)
    seconds = list(gpu_day.PARTS.values())
    assert max(sum(seconds[: gpu_day.FIRST_HALF]), sum(seconds[gpu_day.FIRST_HALF :])) < 600


@pytest.mark.parametrize(
    ("text", "error"), [("print('x'); print('{\"a\": 1}')", ""), ("raise SystemExit('broken')", "broken")]
)  # fmt: skip
def test_results_and_errors_are_appended_as_they_come(tmp_path, monkeypatch, text, error):
    run = subprocess.run

    def run_text(_words, **options):
        return run([sys.executable, "-c", text], **options)

    monkeypatch.setattr(gpu_day.subprocess, "run", run_text)
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--json", str(file), "--small"])
    for name in ("parity", "curve"):
        gpu_day._in_process(name, gpu_day._options())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["part"] for line in lines] == ["parity", "curve"]
    assert all(error in line["error"] if error else line["a"] == 1 for line in lines)


def test_functions_in_bfloat16_agree_with_float64():
    # on a CPU nothing is compiled: what is called compiled on a GPU runs as the rest does
    found = gpu_parity.errors(32, torch.device("cpu"))
    assert max(found.values()) < gpu_parts.TOLERANCE
    assert found["adamw"] < 1e-6 and len(found) == 20


def test_a_hazard_is_kept_whole():
    text = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at triton_red_0+0x120
=========     and Read access at triton_red_0+0x1a0 [16 hazards]
=========
some line of the program
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
    lines = text.splitlines()
    kept = gpu_parts.findings("\n".join([*lines[:4], *["noise"] * 50, *lines[4:]]))
    assert kept[:2] == lines[1:3] and kept[-1] == lines[-1]
    assert len(kept) < gpu_parts.LAST_LINES + 10
