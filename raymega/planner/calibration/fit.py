"""Fit an accelerator's constants to measurements of kernels and transfers, or of whole steps.

Every measurement becomes a case: its seconds, and the formula that predicts them. The module
measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import yaml

from raymega.plan.hardware.catalog import Accelerator
from raymega.planner.kernels.collective_time import GroupSpan, all_reduce_s
from raymega.planner.kernels.kernel_time import attention_s, matmul_s, memory_s

SHARES = (
    "matmul_share", "attention_share", "memory_share", "link_share", "network_share",
)  # fmt: skip
KERNEL_CONSTANTS = ("matmul_share", "matmul_depth", "attention_share", "memory_share", "launch_s")
LINK_CONSTANTS = ("link_share", "link_latency_s")
NETWORK_CONSTANTS = ("network_share", "network_latency_s")
OF_A_STEP = ("matmul_share", "memory_share", "launch_s", "link_share", "network_share")
"""Constants that measurements of whole steps can tell apart."""
MEASURED_TO = 0.05
"""Relative error between a measurement and its formula that counts as one unit in the fit."""
ROUNDS = 30
LEAST_NETWORK_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement that a worker made.

    Attributes:
        kind: Kind of the measurement and its sizes: ``matmul`` (rows, inner, columns),
            ``attention`` (query rows, keys, head width, all causal), ``memory`` (bytes), ``launch``
            (kernels), ``all_reduce`` (bytes, ranks, ranks on one node, workers that reduce on that
            node concurrently) or ``share`` (workers that measured together, cores of the node).
        sizes: Sizes of the measurement, in the order that ``kind`` gives.
        element: Bytes of a number.
        seconds: Median of several rounds; for ``share`` a ratio, the time with all workers over the
            time of one alone.
    """

    kind: str
    sizes: tuple[float, ...]
    element: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Measured time with the formula that predicts it."""

    name: str
    seconds: float
    predict: Callable[[Accelerator], float]

    def error(self, device: Accelerator) -> float:
        """Return the predicted over the measured time, minus 1."""
        return self.predict(device) / self.seconds - 1


def case_of(measured: Measurement) -> Case | None:
    """Return the case of a measurement, or None for a kind that determines no constant."""
    sizes, element = measured.sizes, measured.element
    formulas: Mapping[str, Callable[[Accelerator], float]] = {
        "matmul": lambda device: matmul_s(device, *sizes[:3], element=element),
        "attention": lambda device: attention_s(
            device, sizes[0], sizes[1], sizes[2], element=element
        ),
        "memory": lambda device: memory_s(device, sizes[0]) + device.fitted.launch_s,
        "launch": lambda device: sizes[0] * device.fitted.launch_s,
        "all_reduce": lambda device: _all_reduce_s(device, sizes),
    }
    if measured.kind not in formulas:
        return None
    name = f"{measured.kind} {' '.join(f'{size:g}' for size in sizes)}"
    return Case(name=name, seconds=measured.seconds, predict=formulas[measured.kind])


def _all_reduce_s(device: Accelerator, sizes: Sequence[float]) -> float:
    """Return the seconds of an all-reduce, longer where workers share cores.

    Moving bytes is then work of a core, so all workers that reduce concurrently wait for each
    other.
    """
    num_bytes, ranks, per_node, workers = sizes
    seconds = all_reduce_s(device, GroupSpan(size=int(ranks), per_node=int(per_node)), num_bytes)
    return seconds * sharing(device, workers)


def sharing(device: Accelerator, workers: float) -> float:
    """Return the time of ``workers`` of one node together over the time of one of them alone."""
    return max(1.0, workers / device.shared_cores) if device.shared_cores else 1.0


def calibrate(
    device: Accelerator, cases: Sequence[Case], names: Sequence[str], *, spread: float = 0.5
) -> Accelerator:
    """Return ``device`` with the constants ``names`` fitted to ``cases``.

    The fit is damped Gauss-Newton on the least squares of log errors. A constant that the cases do
    not determine stays at its start.

    Args:
        device: Accelerator whose constants are the start of the fit.
        cases: Measured times with their formulas.
        names: Fields of ``raymega.plan.hardware.catalog.Fitted`` to fit; those that are 0 stay 0.
        spread: Expected distance of a constant from its start, as a logarithm.
    """
    free = [name for name in names if getattr(device.fitted, name) > 0]
    # Fit logarithms: constants stay positive, and errors are relative.
    start = np.log([getattr(device.fitted, name) for name in free])
    base = device.fitted
    if "attention_share" in free:  # measured, whichever kernel it was
        base = replace(base, older_attention_share=0.0)

    def at(point: np.ndarray) -> Accelerator:
        values = {
            name: min(1.0, value) if name in SHARES else value
            for name, value in zip(free, map(float, np.exp(point)), strict=True)
        }
        return replace(device, fitted=replace(base, **values))

    def residuals(point: np.ndarray) -> np.ndarray:
        found = at(point)
        errors = [np.log(case.predict(found) / case.seconds) / MEASURED_TO for case in cases]
        return np.array([*errors, *((point - start) / spread)])

    # Gauss-Newton: accept a step that lowers the error, else raise the damping.
    point, damping = start, 1e-2
    here = residuals(point)
    for _ in range(ROUNDS):
        # Forward differences give the Jacobian.
        slopes = np.array([residuals(point + step) - here for step in 1e-4 * np.eye(len(free))]).T
        slopes /= 1e-4
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ here)
        there = residuals(point + step)
        if np.sum(there**2) < np.sum(here**2):
            point, here, damping = point + step, there, damping / 4
        else:
            damping *= 8
    return at(point)


def fit_device(base: Accelerator, measured: Sequence[Measurement], *, name: str) -> Accelerator:
    """Return an accelerator fitted to kernels and transfers that were measured on it.

    A CPU's peak and bandwidth are measured. A GPU's are its maker's figures, and come from
    ``base``.
    """
    device = replace(base, name=name, driver_name="")
    if base.shared_cores:
        device = _with_peaks(device, measured)
    # Kernels first, then links inside a node, then the network.
    pairs = [(each, case) for each in measured if (case := case_of(each)) is not None]
    kernels = [case for each, case in pairs if each.kind != "all_reduce"]
    device = calibrate(device, kernels, KERNEL_CONSTANTS, spread=3.0)
    for names, is_inside in ((LINK_CONSTANTS, True), (NETWORK_CONSTANTS, False)):
        cases = [
            case for each, case in pairs
            if each.kind == "all_reduce" and (each.sizes[1] <= each.sizes[2]) == is_inside
        ]  # fmt: skip
        if cases:
            if not is_inside:  # from where the network binds for sure, so that times depend on it
                slow = replace(device.fitted, network_share=LEAST_NETWORK_SHARE)
                device = replace(device, fitted=slow)
            device = calibrate(device, cases, names, spread=3.0)
    # State how well the result meets the measurements.
    errors = sorted(abs(case.error(device)) for _, case in pairs)
    known = (
        f"Measured kernels and transfers are met at a median of {errors[len(errors) // 2]:.0%}, worst "
        f"{errors[-1]:.0%}; no whole step has been compared."
    )
    return replace(device, known_error=known)


def _with_peaks(device: Accelerator, measured: Sequence[Measurement]) -> Accelerator:
    """Return ``device`` with peaks from the best measured rates, and the number of shared cores.

    Peaks are the best rates times a margin: 1.1 for 32-bit products and memory, 1.5 for links. The
    16-bit peak is 0.6 of the best rate of products.
    """
    rates = [
        2 * m.sizes[0] * m.sizes[1] * m.sizes[2] / m.seconds * (m.element / 4)
        for m in measured
        if m.kind == "matmul"
    ]
    memory = [m.sizes[0] / m.seconds for m in measured if m.kind == "memory"]
    shares = [m for m in measured if m.kind == "share"]
    if shares:
        # The seconds of a share are a ratio: the time with all workers over that of one alone.
        cores = [min(*m.sizes, max(1.0, m.sizes[0] / m.seconds)) for m in shares]
        device = replace(device, shared_cores=sorted(cores)[len(cores) // 2])
    links = [
        2 * m.sizes[0] * (m.sizes[1] - 1) / m.sizes[1] / m.seconds * sharing(device, m.sizes[3])
        for m in measured
        if m.kind == "all_reduce"
    ]
    # A rate that was reached is below the peak, hence the margins.
    change: dict[str, Any] = {}
    if rates:
        change["peak_32_bit_flops"] = 1.1 * max(rates)
        change["peak_16_bit_flops"] = 0.6 * max(rates)
    if memory:
        change["memory_bytes_per_s"] = 1.1 * max(memory)
    if links:
        change["link_bytes_per_s"] = 1.5 * max(links)
    return replace(device, **change)


def accelerator_yaml(device: Accelerator, *, like: str, comment: str) -> str:
    """Return the text of a YAML file that ``raymega plan --gpu`` takes."""
    figures = asdict(device)
    fitted = {k: v for k, v in figures.pop("fitted").items() if v}
    figures["measured_formats"] = list(device.measured_formats)
    plain = {k: v for k, v in figures.items() if k != "driver_name" and v not in ("", None)}
    name = plain.pop("name")
    text = yaml.safe_dump(_rounded({"name": name, "like": like, **plain}), sort_keys=False)
    return f"# {comment}\n{text}" + yaml.safe_dump({"fitted": _rounded(fitted)}, sort_keys=False)


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with four digits; more were not measured."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
