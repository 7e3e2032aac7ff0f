"""Which kernels a job gets: compiled ones on GPUs, unless it says otherwise or repeats bits."""

import pytest

from raymega.api import load_job
from raymega.plan.hardware.kernel_choice import compiles_kernels
from raymega.plan.memory.activation_shape import activation_shape


@pytest.mark.parametrize(
    ("overrides", "device", "is_compiled"),
    [
        ((), "cuda", True),
        ((), "cpu", False),
        (("cluster.device=cuda",), "", True),
        (("cluster.device=auto",), "", True),
        (("cluster.device=auto",), "cpu", False),
        (("cluster.device=cpu",), "", False),
        (("cluster.device=cuda", "run.deterministic=true"), "cuda", False),
        (("run.kernels=eager",), "cuda", False),
        (("run.kernels=compile", "run.deterministic=true"), "cpu", True),
    ],
)
def test_auto_compiles_on_gpus_alone(overrides, device, is_compiled):
    job = load_job("jobs/verify.yaml", ["cluster.device=cuda", *overrides])
    assert compiles_kernels(job, device) is is_compiled
    assert activation_shape(job).is_fused is compiles_kernels(job)
