"""Describe known accelerators: figures of their makers, and constants fitted to published runs.

The catalogue has devices and links, no models and no layouts. ``benchmarks/planner.py`` fits the
constants and prints their errors on runs that the fit has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from raymega.errors import PlanError

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Rates that a device reaches in practice; one set for all runs on it.

    Attributes:
        matmul_share: Share of the peak that a matrix product large in every dimension reaches.
        matmul_depth: Inner size at which filling and draining the pipes costs as much as the work.
        matmul_waves: Loss, in waves of tiles over all cores, to the last wave that is not full.
        matmul_8_bit_share: Share of the 8-bit peak that such a product reaches.
        attention_share: Share of the peak that fused attention reaches.
        memory_share: Share of the memory's bandwidth that element-wise kernels reach.
        launch_s: Seconds that a kernel takes beyond its work.
        link_share: Share of the bandwidth of links inside a node that a ring reaches.
        network_share: Share of its network bandwidth that a device reaches.
        link_latency_s: Seconds of one step of a ring inside a node.
        network_latency_s: Seconds of one step of a ring between nodes.
        older_attention_share: Share of the peak that fused attention written for the previous
            generation reaches; 0 where it is no slower.
        matmul_4_bit_share: Share of the 4-bit peak that such a product reaches; 0 without fp4.
    """

    matmul_share: float
    matmul_depth: float
    matmul_waves: float
    matmul_8_bit_share: float
    attention_share: float
    memory_share: float
    launch_s: float
    link_share: float
    network_share: float
    link_latency_s: float = 5e-6
    network_latency_s: float = 10e-6
    older_attention_share: float = 0.0
    matmul_4_bit_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """Device, and the links and network of its node.

    Attributes:
        name: Name that ``raymega plan --gpu`` takes.
        peak_16_bit_flops: Peak FLOP/s of dense bfloat16, and of float16 with float32 sums.
        peak_32_bit_flops: Peak FLOP/s of float32 without shortcuts; float64 is taken to have half
            of it.
        peak_8_bit_flops: Peak FLOP/s of dense fp8; 0 without fp8.
        peak_4_bit_flops: Peak FLOP/s of dense fp4; 0 without fp4.
        memory_bytes: Size of the device's memory.
        memory_bytes_per_s: Bandwidth of the device's memory.
        num_cores: Number of streaming multiprocessors; 1 for a CPU worker.
        link_bytes_per_s: Bandwidth to the other devices of the node, in one direction.
        devices_per_node: Number of devices that such links join.
        network_bytes_per_s: Device's share of the node's network bandwidth, in one direction.
        host_bytes_per_s: Bandwidth to the host's memory, in one direction; by default that of PCI
            Express 5.0 with 16 lanes.
        fitted: Rates that the device reaches in practice.
        driver_name: Part of the name that the driver gives the device; empty when it gives none.
        shared_cores: Cores of a node that its ``devices_per_node`` CPU workers share: how many of
            them work concurrently, not a whole number where cores share units. 0 when each device
            works independently.
        straggler: Time of the slowest device of a run over the time of the others.
        known_error: Error of predictions for the device in words, where its file states it.
        measured_formats: Formats of products, ``16-bit``, ``8-bit`` or ``4-bit``, whose constants
            were fitted to runs on this device; those of the others are borrowed.
        price_per_hour: Dollars for an hour of the device; 0 where no price is given.
        spot_price_per_hour: The same on nodes that may be taken away.
        interruptions_per_day: Expected number of times that such a node is taken away in a day.
    """

    name: str
    peak_16_bit_flops: float
    peak_32_bit_flops: float
    peak_8_bit_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    num_cores: int
    link_bytes_per_s: float
    devices_per_node: int
    network_bytes_per_s: float
    fitted: Fitted
    host_bytes_per_s: float = 64e9
    driver_name: str = ""
    shared_cores: float = 0.0
    straggler: float = 1.0
    known_error: str = ""
    peak_4_bit_flops: float = 0.0
    measured_formats: tuple[str, ...] = ()
    price_per_hour: float = 0.0
    spot_price_per_hour: float = 0.0
    interruptions_per_day: float = 0.5

    def peak_flops(self, element: int) -> float:
        """Return the peak FLOP/s of matrix products of numbers with ``element`` bytes."""
        # float64 is taken to have half of float32's
        return {2: self.peak_16_bit_flops, 4: self.peak_32_bit_flops}.get(
            element, self.peak_32_bit_flops / 2
        )

    @property
    def attention_flops(self) -> float:
        """FLOP/s that fused attention of 16-bit numbers reaches."""
        return self.peak_16_bit_flops * self.fitted.attention_share

    @property
    def reached_link_bytes_per_s(self) -> float:
        """Bandwidth of the links that a ring inside a node reaches."""
        return self.link_bytes_per_s * self.fitted.link_share

    @property
    def reached_network_bytes_per_s(self) -> float:
        """Network bandwidth that a device reaches."""
        return self.network_bytes_per_s * self.fitted.network_share

    def bytes_per_s(self, span: float) -> float:
        """Return the bandwidth of one device to a group that spans ``span`` neighbouring ranks."""
        is_inside = span <= self.devices_per_node
        return self.reached_link_bytes_per_s if is_inside else self.reached_network_bytes_per_s

    def with_4_bit_products(self) -> Accelerator:
        """Return the device with products in fp4 where it has fp8; without fp4 it stays as it is."""
        if not self.peak_4_bit_flops:
            return self
        share = self.fitted.matmul_4_bit_share
        fitted = replace(self.fitted, matmul_8_bit_share=share)
        return replace(self, peak_8_bit_flops=self.peak_4_bit_flops, fitted=fitted)

    def with_older_attention(self) -> Accelerator:
        """Return the device with fused attention that was written for the previous generation."""
        share = self.fitted.older_attention_share
        if not share:
            return self
        return replace(self, fitted=replace(self.fitted, attention_share=share))


# fitted by benchmarks/planner.py; _CPU was measured on one host
_A100 = Fitted(
    matmul_share=0.716, matmul_depth=78.4, matmul_waves=0.297, matmul_8_bit_share=0.0,
    attention_share=0.441, memory_share=0.266, launch_s=4.0e-6, link_share=0.806, network_share=0.793,
)  # fmt: skip
_H100 = Fitted(
    matmul_share=0.692, matmul_depth=80.0, matmul_waves=0.302, matmul_8_bit_share=0.668,
    attention_share=0.396, memory_share=0.288, launch_s=4.0e-6, link_share=0.777, network_share=0.783,
    # FlashAttention-2; 0.35 in Shah et al., FlashAttention-3, 2024, abstract
    older_attention_share=0.319,
)  # fmt: skip
_B200 = Fitted(
    matmul_share=0.695, matmul_depth=80.0, matmul_waves=0.303, matmul_8_bit_share=0.651,
    matmul_4_bit_share=0.463, attention_share=0.427, memory_share=0.300, launch_s=4.2e-6,
    link_share=0.802, network_share=0.795, older_attention_share=0.35,
)  # fmt: skip
_V100 = _A100
_CPU = Fitted(
    matmul_share=0.8, matmul_depth=40.0, matmul_waves=0.0, matmul_8_bit_share=0.0,
    attention_share=0.3, memory_share=0.6, launch_s=12e-6, link_share=0.8, network_share=0.8,
    link_latency_s=150e-6, network_latency_s=500e-6,
)  # fmt: skip

_A100_SXM = Accelerator(
    name="a100", peak_16_bit_flops=312e12, peak_32_bit_flops=19.5e12, peak_8_bit_flops=0.0,
    memory_bytes=80 * GIB, memory_bytes_per_s=2.0e12, num_cores=108, link_bytes_per_s=300e9,
    devices_per_node=8, network_bytes_per_s=25e9, fitted=_A100, driver_name="A100",
    host_bytes_per_s=32e9, measured_formats=("16-bit",),
)  # fmt: skip
_H100_SXM = Accelerator(
    name="h100", peak_16_bit_flops=989e12, peak_32_bit_flops=67e12, peak_8_bit_flops=1979e12,
    memory_bytes=80 * GIB, memory_bytes_per_s=3.35e12, num_cores=132, link_bytes_per_s=450e9,
    devices_per_node=8, network_bytes_per_s=50e9, fitted=_H100, driver_name="H100",
    measured_formats=("16-bit", "8-bit"),
)  # fmt: skip
_B200_SXM = Accelerator(
    name="b200", peak_16_bit_flops=2250e12, peak_32_bit_flops=75e12, peak_8_bit_flops=4500e12,
    peak_4_bit_flops=9000e12, memory_bytes=180 * 10**9, memory_bytes_per_s=8.0e12, num_cores=148,
    link_bytes_per_s=900e9, devices_per_node=8, network_bytes_per_s=50e9, fitted=_B200,
    driver_name="B200", measured_formats=("16-bit", "8-bit"),
)  # fmt: skip
_DEVICES = (
    # Volta: NVIDIA V100 data sheet (SXM2, 32 GB) and DGX-2 data sheet, 2018; neither bfloat16 nor fp8
    Accelerator(
        name="v100", peak_16_bit_flops=125e12, peak_32_bit_flops=15.7e12, peak_8_bit_flops=0.0,
        memory_bytes=32 * GIB, memory_bytes_per_s=0.9e12, num_cores=80, link_bytes_per_s=150e9,
        devices_per_node=8, network_bytes_per_s=6.25e9, fitted=_V100, driver_name="V100",
        host_bytes_per_s=16e9,
    ),
    # Ampere: NVIDIA A100 data sheet, 2021; no fp8. A800 is the same with 400 GB/s of NVLink.
    _A100_SXM,
    replace(_A100_SXM, name="a800", link_bytes_per_s=200e9, driver_name="A800", measured_formats=()),
    # Hopper: NVIDIA H100 and H200 data sheets, 2023. H800 is an H100 with 400 GB/s of NVLink.
    _H100_SXM,
    replace(_H100_SXM, name="h800", link_bytes_per_s=200e9, driver_name="H800", measured_formats=()),
    replace(
        _H100_SXM, name="h100-96gb", peak_16_bit_flops=912e12, peak_32_bit_flops=64e12,
        peak_8_bit_flops=1824e12, memory_bytes=96 * 10**9, memory_bytes_per_s=2.4e12, driver_name="",
    ),
    replace(
        _H100_SXM, name="h200", memory_bytes=141 * 10**9, memory_bytes_per_s=4.8e12,
        driver_name="H200", measured_formats=(),
    ),
    # Blackwell: NVIDIA HGX and GB200 NVL72 data sheets, 2024 and 2025, dense figures
    _B200_SXM,
    replace(
        _B200_SXM, name="gb200", peak_16_bit_flops=2500e12, peak_32_bit_flops=80e12,
        peak_8_bit_flops=5000e12, peak_4_bit_flops=10000e12, memory_bytes=186 * 10**9,
        devices_per_node=72, driver_name="GB200", host_bytes_per_s=225e9,
    ),
    # Blackwell Ultra: NVIDIA HGX B300 and GB300 NVL72 data sheets, 2025, dense figures
    replace(
        _B200_SXM, name="b300", peak_4_bit_flops=13500e12, memory_bytes=270 * 10**9, num_cores=160,
        network_bytes_per_s=100e9, driver_name="B300",
    ),
    replace(
        _B200_SXM, name="gb300", peak_16_bit_flops=2500e12, peak_32_bit_flops=80e12,
        peak_8_bit_flops=5000e12, peak_4_bit_flops=15000e12, memory_bytes=279 * 10**9, num_cores=160,
        devices_per_node=72, network_bytes_per_s=100e9, driver_name="GB300", host_bytes_per_s=225e9,
    ),
    # a worker with one thread
    Accelerator(
        name="cpu", peak_16_bit_flops=60e9, peak_32_bit_flops=100e9, peak_8_bit_flops=0.0,
        memory_bytes=8 * GIB, memory_bytes_per_s=10e9, num_cores=1, link_bytes_per_s=2e9,
        devices_per_node=64, network_bytes_per_s=1.25e9, fitted=_CPU, shared_cores=2,
        host_bytes_per_s=10e9,
    ),
)  # fmt: skip
CATALOGUE = {device.name: device for device in _DEVICES}
"""Figures of makers, with constants that ``benchmarks/planner.py`` fitted to published runs.

a800, h800 and h200 have the constants of a100 and h100, because no run on them has been compared.
b200, gb200, b300 and gb300 share one set. A node of gb200 and gb300 is a rack of 72. h100-96gb runs
at 500 W, at a peak between that of the module and that of the card (835e12): the middle is taken.
cpu is one thread of a worker on the host that its constants were measured on, whose workers share
two cores; ``raymega doctor`` writes the constants of another host.
"""


def accelerator(name: str, *, field: str = "--gpu") -> Accelerator:
    """Return the catalogue's entry of a name.

    Args:
        name: Name of the device.
        field: Field or option that holds the name, for messages.

    Raises:
        PlanError: The catalogue has no device of that name.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.6)
    raise PlanError(
        fact=f"{field} {name}",
        rule=f"the catalogue has {', '.join(CATALOGUE)}",
        remedy=f"use {next(iter(near), 'one of these, or a YAML file as docs/planner.md shows')}",
    )
