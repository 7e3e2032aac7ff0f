"""Builds the stand-in's two libraries, and says in which environment: torch's CUDA build with a C++ compiler."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

DEVICE = Path(__file__).with_name("device")
CUDA_CRT = "nvidia-cuda-crt==13.0.88"
"""Headers of nvcc's run time, which torch's wheels lack."""


def build_device(folder: Path) -> dict[str, str]:
    """Compile what changed since the last time; return the environment of a process that runs on the stand-in.

    Raises:
        subprocess.CalledProcessError: a compiler refused.
    """
    sources = sorted(DEVICE.iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    out = folder / f"device-{digest}"
    if not (out / "libcuda.so").exists():
        out.mkdir(parents=True, exist_ok=True)
        headers = [f"-I{path}" for path in _headers(folder)]
        shared = ["-O1", "-shared", "-fPIC"]
        cpp = [str(path) for path in sources if path.suffix == ".cpp"]
        library = [
            "-std=c++17",
            "-fvisibility=hidden",
            "-o",
            str(out / "libbooks.so"),
            *cpp,
            *headers,
            "-ldl",
        ]
        subprocess.run(["g++", *shared, *library], check=True)
        driver = [
            "-w",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(out / "libcuda.so.1"),
            str(DEVICE / "driver.c"),
        ]
        subprocess.run(["gcc", *shared, *driver], check=True)
        (out / "libcuda.so").symlink_to("libcuda.so.1")
    return {
        **os.environ,
        "LD_PRELOAD": str(out / "libbooks.so"),
        "LD_LIBRARY_PATH": str(out),
        "OMP_NUM_THREADS": "1",
        # kernels that Inductor compiles, for the next time
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
    }


def _headers(folder: Path) -> list[Path]:
    crt = folder / "crt"
    if not crt.exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(crt),
            CUDA_CRT,
        ]
        subprocess.run(install, check=True)
    site = Path(sysconfig.get_path("purelib"))
    found = [*site.glob("nvidia/*/include"), *crt.glob("nvidia/*/include")]
    return [*found, site / "triton/backends/nvidia/include"]
