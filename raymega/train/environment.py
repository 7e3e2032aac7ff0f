"""Set-up of the worker's process: threads, device, determinism, gloo's network interface."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import socket
import struct
from contextlib import suppress

import torch

from raymega.config.data import MEGATRON
from raymega.data.streaming.remote_dataset import read_descriptions
from raymega.errors import ConfigError, Fault, RaymegaError
from raymega.plan.hardware.kernel_choice import compiles_kernels
from raymega.plan.run_plan import RunPlan
from raymega.storage.registry import load_client

REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")


def prepare_process(plan: RunPlan, *, device: str, local_rank: int) -> torch.device:
    """Set threads and determinism for this worker and return its device.

    With GPUs, Ray shows a worker only its own, so its index is 0 unless several are visible.
    """
    # One worker uses the cores that Ray reserved for it, not all of the node's.
    torch.set_num_threads(max(1, int(plan.job.cluster.cpus_per_worker)))
    _repeat_exactly(is_on=plan.job.run.deterministic)
    _sum_in_float32()
    if device == "cpu":
        return torch.device("cpu")
    _keep_alive_on_nccl_errors()
    # 8 buffers of 4 MiB: no two streams share one, so that equal products give equal bits, and the plan
    # knows the bytes. cuBLAS reads this at the first handle, which comes after.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    index = local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_lazy_parts(plan: RunPlan, device: str) -> None:
    """Import the modules that torch loads lazily in the first step, and make clients of stores, while no other rank waits.

    torch.utils.checkpoint imports torch._dynamo at first use, 1.5 s of CPU time; Inductor takes 1.3 s more.
    """
    for uri in (*plan.job.data.datasets, plan.job.checkpoint.uri):
        load_client(uri.removeprefix(MEGATRON))
    with suppress(RaymegaError):  # told when a rank opens them
        read_descriptions(plan.datasets)
    is_compiling = compiles_kernels(plan.job, device)
    if is_compiling or plan.job.memory.recompute == "full":
        importlib.import_module("torch._dynamo")
    if is_compiling:
        importlib.import_module("torch._inductor.compile_fx")


def refused_operation(error: Exception) -> ConfigError | None:
    """Return a ConfigError where torch refused a kernel under run.deterministic; else None."""
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
    """Switch bit-exact repetition on or off: kernels, cuBLAS workspaces, NCCL's order of sums."""
    if (
        torch.are_deterministic_algorithms_enabled() != is_on
    ):  # the call loads torch's compiler: 1 s
        torch.use_deterministic_algorithms(mode=is_on)
    torch.backends.cudnn.deterministic = is_on
    # torch would fill each new tensor, to show reads of what was never written: a pass over all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its types
    if is_on:
        # NCCL reads this at the first communicator, which comes after this.
        os.environ.setdefault("NCCL_ALGO", "Ring")


def _keep_alive_on_nccl_errors() -> None:
    """Let torch's watchdog note NCCL's errors instead of ending the process; `comm/world.py` acts on them.

    A process that survives serves the next attempt. torch reads these variables when a group is made. Its flight
    recorder is on by default: at an error each rank writes its last 2,000 operations.
    """
    # 0: note an error; by default the watchdog ends the process
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # A monitor would end it too, some minutes after an error.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # For four times this after an error, 60 s by default, the watchdog blocks whoever launches an operation.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")


def _sum_in_float32() -> None:
    """Keep split-K GEMMs summing in float32; torch's default is the dtype of the output."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def listen_towards(rendezvous: str) -> None:
    """Let gloo listen on the network card that leads to ``host:port``, unless the user chose one.

    By default gloo binds to the address of the host's name. On Debian and Ubuntu that is 127.0.1.1,
    which no other machine reaches.
    """
    host, _, port = rendezvous.rpartition(":")
    card = _card_of(_own_address(host.strip("[]"), int(port)))
    if card:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``; a UDP connect sends nothing."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _card_of(address: str) -> str:
    """Return the network card whose first IPv4 address this is; '' if none, or not on Linux."""
    ask_for_address = 0x8915  # SIOCGIFADDR, Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, ask_for_address, struct.pack("256s", name.encode()))
            except OSError:
                continue  # card without an IPv4 address
            # struct ifreq: 16 bytes of name, then sockaddr_in, whose address is at 4.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
