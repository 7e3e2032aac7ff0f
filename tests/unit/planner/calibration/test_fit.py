"""Constants from measurements: those that made the times come out again, the rest stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.planner.calibration.fit import (
    Measurement,
    accelerator_yaml,
    calibrate,
    case_of,
    fit_device,
)

H100 = CATALOGUE["h100"]
SIZES = {
    "matmul": [(8192, 8192, 8192), (8192, 512, 8192), (1024, 64, 1024)],
    "attention": [(32 * 4096, 4096, 128)],
    "memory": [(2**30,)],
    "launch": [(128,)],
    "all_reduce": [(2.0**p, n, 8, 8) for n in (8, 16) for p in (12, 20, 28)],
}


def measured_on(device, *, times=1.0, element=2):
    """What a device with just these constants would show."""
    found = []
    for kind, rows in SIZES.items():
        for sizes in rows:
            empty = Measurement(
                kind=kind, sizes=tuple(map(float, sizes)), element=element, seconds=1.0
            )
            seconds = case_of(empty).predict(device) * times
            found.append(replace(empty, seconds=seconds))
    return found


def test_constants_that_made_the_times_are_found_again():
    wanted = replace(
        H100.fitted, matmul_share=0.5, matmul_depth=200.0, attention_share=0.3, memory_share=0.6,
        launch_s=8e-6, link_share=0.5, network_share=0.4, link_latency_s=2e-5,
        network_latency_s=5e-5,
    )  # fmt: skip
    found = fit_device(H100, measured_on(replace(H100, fitted=wanted)), name="mine").fitted
    for name in (
        "matmul_share", "matmul_depth", "attention_share", "memory_share", "launch_s", "link_share",
        "network_share", "link_latency_s", "network_latency_s",
    ):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0.03), name


def test_what_was_not_measured_stays():
    cases = [case_of(each) for each in measured_on(H100, times=2.0) if each.kind == "memory"]
    found = calibrate(H100, cases, ("memory_share", "network_share"))
    assert found.fitted.network_share == H100.fitted.network_share
    assert found.fitted.memory_share < 0.6 * H100.fitted.memory_share


def test_shares_stay_shares_however_fast_the_measured_is():
    cases = [case_of(each) for each in measured_on(H100, times=0.1)]
    found = calibrate(H100, cases, ("matmul_share", "link_share"), spread=5.0).fitted
    assert found.matmul_share == found.link_share == 1.0


def test_a_cpus_peaks_are_what_was_measured_and_workers_share_its_cores():
    cpu = replace(
        CATALOGUE["cpu"], peak_32_bit_flops=300e9, memory_bytes_per_s=50e9, shared_cores=4.0
    )
    shown = measured_on(cpu, element=4)
    shown.append(Measurement(kind="share", sizes=(8.0, 64.0), element=4, seconds=2.0))
    found = fit_device(CATALOGUE["cpu"], shown, name="box")
    assert found.shared_cores == 4.0
    # Eight workers reduced at once on four cores; the latency is that of one with a core of its own.
    latency_s = cpu.fitted.link_latency_s
    assert found.fitted.link_latency_s == pytest.approx(latency_s, rel=0.1)
    reached = found.peak_32_bit_flops * found.fitted.matmul_share
    assert reached == pytest.approx(300e9 * cpu.fitted.matmul_share, rel=0.3)


def test_workers_have_no_more_cores_than_there_are():
    """On a machine that others use, more workers get more of it than one does."""
    share = Measurement(kind="share", sizes=(8.0, 2.0), element=4, seconds=1.5)
    shown = [*measured_on(CATALOGUE["cpu"], element=4), share]
    assert fit_device(CATALOGUE["cpu"], shown, name="box").shared_cores == 2.0


def test_the_file_is_read_back_as_the_same_accelerator(tmp_path):
    found = fit_device(H100, measured_on(H100), name="mine")
    path = tmp_path / "mine.yaml"
    path.write_text(accelerator_yaml(found, like="h100", comment="a test"))
    again = find_accelerator(str(path))
    assert again.name == "mine" and "Measured kernels" in again.known_error
    assert again.fitted.memory_share == pytest.approx(found.fitted.memory_share, rel=1e-3)
    assert again.link_bytes_per_s == found.link_bytes_per_s
