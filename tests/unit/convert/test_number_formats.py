"""Number formats: torch's own casts, bit for bit."""

import numpy as np
import pytest
import torch

from raymega.convert.number_formats import recast

VALUES = torch.cat(
    (
        torch.randn(2000, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.39e38, 1e-40, 65504.0]),
        torch.tensor([float("inf"), -float("inf"), float("nan")]),
    )
)


def _bits(tensor):
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_recast_is_torchs_cast(source, target):
    values = VALUES.to(getattr(torch, source))
    wanted = _bits(values.to(getattr(torch, target)))
    with np.errstate(over="ignore"):
        ours = recast(_bits(values), source, target)
    if target == "bfloat16":
        is_nan = (wanted & 0x7FFF) > 0x7F80
        assert (((ours & 0x7FFF) > 0x7F80) == is_nan).all()
        assert (ours == wanted)[~is_nan].all()
    else:
        np.testing.assert_array_equal(ours, wanted)
