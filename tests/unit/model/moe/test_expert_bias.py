"""Biases of routed experts: each row has its expert's, in the columns of this rank."""

import torch

from raymega.model.moe.expert_bias import add_expert_bias

COUNTS, FIRST = (2, 0, 3, 1), 4


def test_each_row_has_its_expert_s_bias_and_each_bias_the_sum_of_its_rows():
    numbers = torch.Generator().manual_seed(0)
    rows, slopes = torch.randn(2, 6, 7, generator=numbers, dtype=torch.float64)
    bias = torch.randn(4, 2, generator=numbers, dtype=torch.float64).requires_grad_()
    rows.requires_grad_()
    found = add_expert_bias(rows, bias, torch.tensor(COUNTS), first=FIRST)
    found.backward(slopes)
    wanted, sums, begin = rows.detach().clone(), torch.zeros(4, 2, dtype=torch.float64), 0
    for expert, count in enumerate(COUNTS):
        for row in range(begin, begin + count):
            wanted[row, FIRST : FIRST + 2] += bias.detach()[expert]
            sums[expert] += slopes[row, FIRST : FIRST + 2]
        begin += count
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(bias.grad, sums, rtol=0, atol=1e-14)
    assert torch.equal(rows.grad, slopes)
