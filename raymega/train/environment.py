"""The worker's process: threads, device, determinism. The only reader of its environment."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import socket
import struct

import torch

from raymega.errors import ConfigError, Fault
from raymega.plan.run_plan import RunPlan

REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")


def prepare_process(plan: RunPlan, *, device: str, local_rank: int) -> torch.device:
    """Set threads and determinism for this worker and return its device.

    With GPUs, Ray shows a worker only its own, so its index is 0 unless several are visible.
    """
    torch.set_num_threads(max(1, int(plan.job.cluster.cpus_per_worker)))
    _repeat_exactly(is_on=plan.job.run.deterministic)
    _sum_in_float32()
    if device == "cpu":
        return torch.device("cpu")
    index = local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_lazy_parts(plan: RunPlan) -> None:
    """Load what torch would in the first step only, while nobody waits for it.

    torch.utils.checkpoint loads the compiler when it is first used, 1.5 s of a CPU; kernels take 1.3 s more.
    """
    is_compiling = plan.job.run.kernels == "compile"
    if is_compiling or plan.job.memory.recompute == "full":
        importlib.import_module("torch._dynamo")
    if is_compiling:
        importlib.import_module("torch._inductor.compile_fx")


def refused_operation(error: Exception) -> ConfigError | None:
    """The user's error in torch's refusal of a kernel under run.deterministic; else None."""
    found = REFUSAL.search(str(error))
    if not found:
        return None
    return ConfigError(
        Fault(
            fact=f"run.deterministic=true, and {found[1]} has no deterministic kernel here",
            rule="every operation of the step must give equal bits each time",
            remedy="set run.deterministic=false, or leave out what needs the operation",
        )
    )


def _repeat_exactly(*, is_on: bool) -> None:
    """Equal runs on equal machines give equal bits: kernels, cuBLAS' workspaces, NCCL's order."""
    if (
        torch.are_deterministic_algorithms_enabled() != is_on
    ):  # the call loads torch's compiler: 1 s
        torch.use_deterministic_algorithms(mode=is_on)
    torch.backends.cudnn.deterministic = is_on
    if is_on:
        # Read when the first handle and the first communicator are made, which is after this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def _sum_in_float32() -> None:
    """By default torch lets a split GEMM add its parts in the format of its output."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def listen_towards(rendezvous: str) -> None:
    """Let gloo listen on the network card that leads to ``host:port``, unless the user chose one.

    By itself gloo listens where the machine's name leads. On Debian and Ubuntu that is 127.0.1.1,
    where no other machine reaches it.
    """
    host, _, port = rendezvous.rpartition(":")
    card = _card_of(_own_address(host.strip("[]"), int(port)))
    if card:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``; nothing is sent."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _card_of(address: str) -> str:
    """The network card whose first address this is; '' for a second one, IPv6 or another system."""
    ask_for_address = 0x8915  # SIOCGIFADDR, Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, ask_for_address, struct.pack("256s", name.encode()))
            except OSError:
                continue  # a card without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
