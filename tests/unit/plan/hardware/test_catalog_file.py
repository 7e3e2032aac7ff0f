"""Accelerators by file: what is left out is the catalogue's, and nothing else is let through."""

from __future__ import annotations

from dataclasses import fields

import pytest

from raymega.errors import ConfigError, PlanError
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator, Fitted
from raymega.plan.hardware.catalog_file import AcceleratorFigures, FittedFigures, find_accelerator

SLOW_NETWORK = """
name: h100-100g
like: h100
devices_per_node: 4
network_bytes_per_s: 12.5e9
fitted: {network_share: 0.7}
"""


@pytest.fixture
def read(tmp_path):
    def of(text: str) -> Accelerator:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return find_accelerator(str(path))

    return of


def test_what_is_left_out_is_that_of_the_device_it_is_like(read):
    found, h100 = read(SLOW_NETWORK), CATALOGUE["h100"]
    assert (found.name, found.devices_per_node, found.network_bytes_per_s) == (
        "h100-100g", 4, 12.5e9,
    )  # fmt: skip
    assert found.fitted.network_share == 0.7
    assert found.fitted.matmul_share == h100.fitted.matmul_share
    assert found.peak_16_bit_flops == h100.peak_16_bit_flops
    assert found.driver_name == ""


def test_a_share_of_attention_that_is_given_is_that_of_the_kernel_that_is_used(read):
    found = read("name: mine\nlike: h100\nfitted: {attention_share: 0.5}")
    assert found.with_older_attention().fitted.attention_share == 0.5


def test_a_name_is_the_catalogues():
    assert find_accelerator("a100") is CATALOGUE["a100"]
    with pytest.raises(PlanError, match="p100"):
        find_accelerator("p100")


def test_a_device_that_is_only_described_has_no_measured_constants(read):
    assert read("name: mine\nlike: h100").measured_formats == ()
    stated = read("name: mine\nlike: h100\nmeasured_formats: [16-bit]")
    assert stated.measured_formats == ("16-bit",)
    calibrated = read("name: mine\nlike: h100\nknown_error: Fitted to a run.")
    assert calibrated.measured_formats == CATALOGUE["h100"].measured_formats


def test_every_figure_of_a_device_can_be_given():
    assert {f.name for f in fields(Fitted)} == set(FittedFigures.model_fields)
    assert {f.name for f in fields(Accelerator)} - {"driver_name"} == set(
        AcceleratorFigures.model_fields
    ) - {"like"}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("memory_gb: 80", "memory_gb"),
        ("num_cores: 0", "num_cores=0"),
        ("num_cores: '132'", "num_cores='132'"),
        ("link_bytes_per_s: .inf", "link_bytes_per_s=inf"),
        ("memory_bytes: -1", "memory_bytes=-1"),
        ("like: h1000", "like='h1000'"),
        ("name: h100", "name='h100'"),
        ("fitted: {matmul_share: 1.2}", "fitted.matmul_share=1.2"),
        ("fitted: {matmul: 0.5}", "fitted.matmul="),
    ],
)
def test_what_no_device_has_is_refused_by_name(read, line, match):
    key = line.partition(":")[0]
    kept = [kept for kept in SLOW_NETWORK.splitlines() if not kept.startswith(f"{key}:")]
    with pytest.raises(ConfigError, match=match):
        read("\n".join([*kept, line]))


@pytest.mark.parametrize(
    "text", ["", "- a", "name: [", "name: x\nname: y\nlike: h100", "like: h100"]
)
def test_what_is_no_accelerator_is_refused(read, text):
    with pytest.raises(ConfigError):
        read(text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        find_accelerator(str(tmp_path / "gone.yaml"))
