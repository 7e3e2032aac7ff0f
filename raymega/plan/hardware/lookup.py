"""Look up catalogue devices by the name that a driver gives, and define an H100 in round figures.

``raymega.plan.hardware.catalog`` owns the figures. This module adds cards, which no catalogue entry
is, and the constants of formulas that must not follow a fit.
"""

from __future__ import annotations

from dataclasses import replace

from raymega.plan.hardware.catalog import CATALOGUE, Accelerator

CARD_16_BIT_FLOPS = {
    "V100-PCIE": 112e12,
    "H100 PCIe": 756e12,
    "H800 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
}
"""Peak FLOP/s of dense bfloat16 on cards for PCIe slots, which run at other clocks than the modules
of the catalogue, by NVIDIA's data sheets."""
_OTHERS = ("GH200",)
"""Names of devices that are no modules of the catalogue."""
_CARDS = ("PCIe", "PCIE", "NVL", *_OTHERS)
_16_BIT = ("bfloat16", "float16")


def nvlink_bytes_per_s(device_name: str) -> float | None:
    """Return the bytes/s that a GPU sends to the others of its node, or None when unknown."""
    module = named_module(device_name)
    if module is None or any(name in device_name for name in _CARDS):
        return None
    return module.link_bytes_per_s


def peak_flops(device_name: str, *, dtype: str) -> float | None:
    """Return the FLOP/s of one device for matrices of ``dtype``, or None when unknown.

    Args:
        device_name: Name that the driver gives, such as ``NVIDIA H100 80GB HBM3``.
        dtype: Value of the job's ``precision.dtype``.
    """
    # a card before the module whose name it contains
    if dtype not in _16_BIT or any(name in device_name for name in _OTHERS):
        return None
    card = next((v for name, v in CARD_16_BIT_FLOPS.items() if name in device_name), None)
    module = named_module(device_name)
    return card or (module.peak_16_bit_flops if module else None)


def named_module(device_name: str) -> Accelerator | None:
    """Return the catalogue's device that a driver's name is of, or None when it has none."""
    devices = (device for device in CATALOGUE.values() if device.driver_name)
    named = [device for device in devices if device.driver_name in device_name]
    # The longest match: the name of a GB200 contains B200 as well.
    return max(named, key=lambda device: len(device.driver_name), default=None)


ROUND_H100 = replace(
    CATALOGUE["h100"],
    fitted=replace(
        CATALOGUE["h100"].fitted, matmul_share=0.6, attention_share=0.4, launch_s=2e-6, link_share=1.0,
        network_share=1.0, network_latency_s=15e-6,
    ),
)  # fmt: skip
"""DGX H100 with one 400 Gb/s adapter a GPU: the maker's peaks and links with round shares and
times, none of them measured.

Dynamic context parallelism compares packs with these: its decisions must not change whenever the
catalogue is fitted again.
"""
