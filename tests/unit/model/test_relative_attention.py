"""Terms of scores by document: what is not seen weighs nothing, and no format overflows."""

import pytest
import torch

from raymega.model.attention.relative_attention import document_mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_token_that_sees_no_key_has_finite_weights(dtype):
    keys, score = torch.zeros(1, 3, dtype=torch.int64), torch.full((3,), -40.0, dtype=dtype)
    nothing, own = document_mask(torch.tensor([[-1, 0]]), keys, dtype)[0, 0]
    assert (nothing + score).softmax(-1).tolist() == pytest.approx([1 / 3] * 3, rel=1e-2)
    assert own.tolist() == [0.0] * 3
    assert (torch.stack((nothing[0] + 40, own[0] - 40))).softmax(0).tolist() == [0.0, 1.0]
