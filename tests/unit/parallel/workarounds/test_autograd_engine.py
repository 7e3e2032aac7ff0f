import subprocess
import sys

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from raymega.errors import InternalError
from raymega.parallel.workarounds.autograd_engine import add_gradients, find_gradients


def test_gradients_are_those_of_torch_and_leaves_are_left_alone():
    x, unused = torch.randn(3, 2, requires_grad=True), torch.ones(1, requires_grad=True)
    gradient = torch.randn(3, 2)
    (wanted,) = torch.autograd.grad(x.exp(), x, gradient)
    found = find_gradients(x.exp(), [x, unused], gradient)
    assert torch.equal(found[0], wanted)
    assert found[1] is None
    assert x.grad is None


def test_gradients_are_added_from_a_tensor_and_from_the_edge_it_came_from():
    x, gradient = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    (wanted,) = torch.autograd.grad(x.exp(), x, gradient)
    add_gradients(x.exp(), gradient)
    add_gradients(get_gradient_edge(x.exp()), gradient)
    torch.testing.assert_close(x.grad, 2 * wanted, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (5, 1, 2), (2,)], ids=str)
def test_a_gradient_of_another_shape_is_refused(shape):
    """The engine itself would sum one that is larger."""
    x = torch.randn(1, 2, requires_grad=True)
    for output in (x.exp(), get_gradient_edge(x.exp())):
        with pytest.raises(InternalError, match=r"its output \(1, 2\)"):
            add_gradients(output, torch.ones(shape))
    assert x.grad is None


def test_a_worker_loads_no_sympy_before_it_trains():
    """0.4 s of a CPU in each new process, as torch.autograd's own calls would load it."""
    code = (
        "import sys, torch; from raymega.train import entry; from raymega.parallel.workarounds.autograd_engine import *; "
        "add_gradients(torch.ones(1, requires_grad=True).sum(), torch.ones(())); "
        "sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
