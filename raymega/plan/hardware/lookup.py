"""Views of the catalogue: by the name that a driver gives a device, and as cost formulas take it.

Figures are accelerators' to own; here are only cards, which no catalogue entry is, and the shares
that formulas without a fit are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.plan.hardware.catalog import CATALOGUE, Accelerator

CARD_16_BIT_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12}
"""Dense bfloat16 of cards for PCIe slots, which run at other clocks than the modules of the
catalogue, by NVIDIA's data sheets."""
_OTHERS = ("GH200",)
"""Names of what is no module of the catalogue."""
_CARDS = ("PCIe", "PCIE", "NVL", *_OTHERS)
_16_BIT = ("bfloat16", "float16")


def nvlink_bytes_per_s(device_name: str) -> float | None:
    """What a GPU of that name sends to the others of its node, or None when it is not known."""
    module = _module(device_name)
    if module is None or any(name in device_name for name in _CARDS):
        return None
    return module.link_bytes_per_s


def peak_flops(device_name: str, *, dtype: str) -> float | None:
    """FLOP/s of one device for matrices of ``dtype``, or None when nothing is known of it.

    Args:
        device_name: Such as ``NVIDIA H100 80GB HBM3``.
        dtype: The job's ``precision.dtype``.
    """
    if dtype not in _16_BIT or any(name in device_name for name in _OTHERS):
        return None
    card = next((v for name, v in CARD_16_BIT_FLOPS.items() if name in device_name), None)
    module = _module(device_name)
    return card or (module.peak_16_bit_flops if module else None)


def _module(device_name: str) -> Accelerator | None:
    devices = (device for device in CATALOGUE.values() if device.driver_name)
    named = [device for device in devices if device.driver_name in device_name]
    # The longest: a GB200 is no B200, though its name holds that one's.
    return max(named, key=lambda device: len(device.driver_name), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one kind of cluster does in practice, for cost formulas.

    Attributes:
        flops: Peak FLOP/s of 16-bit matrices.
        matrix_share: Share of the peak that large matrix products reach.
        attention_share: Share that fused causal attention reaches, forward and backward together.
        near_bytes_per_s: One GPU to others of its node, one direction.
        far_bytes_per_s: One GPU to another node.
        hop_s: Of a message, however short.
        launch_s: Of a kernel, however small.
        ranks_per_node: GPUs of a node.
    """

    flops: float
    matrix_share: float
    attention_share: float
    near_bytes_per_s: float
    far_bytes_per_s: float
    hop_s: float
    launch_s: float
    ranks_per_node: int

    def bytes_per_s(self, span: float) -> float:
        """Of one GPU to a group that reaches over ``span`` neighbouring ranks."""
        return self.near_bytes_per_s if span <= self.ranks_per_node else self.far_bytes_per_s


def round_hardware(device: Accelerator) -> Hardware:
    """The maker's peaks and links with round shares and times, the same for every device.

    Dynamic context parallelism compares packs with these: what it decides must not change whenever
    the catalogue is fitted anew. Nothing here was measured.
    """
    return Hardware(
        flops=device.peak_16_bit_flops,
        matrix_share=0.6,
        attention_share=0.4,
        near_bytes_per_s=device.link_bytes_per_s,
        far_bytes_per_s=device.network_bytes_per_s,
        hop_s=15e-6,
        launch_s=2e-6,
        ranks_per_node=device.devices_per_node,
    )


def fitted_hardware(device: Accelerator) -> Hardware:
    """The same as the catalogue's fit has it: what step times are predicted with."""
    fitted = device.fitted
    return Hardware(
        flops=device.peak_16_bit_flops,
        matrix_share=fitted.matmul_share,
        attention_share=fitted.attention_share,
        near_bytes_per_s=device.link_bytes_per_s * fitted.link_share,
        far_bytes_per_s=device.network_bytes_per_s * fitted.network_share,
        hop_s=fitted.network_latency_s,
        launch_s=fitted.launch_s,
        ranks_per_node=device.devices_per_node,
    )


ROUND_H100 = round_hardware(CATALOGUE["h100"])
"""DGX H100: one 400 Gb/s adapter a GPU."""
