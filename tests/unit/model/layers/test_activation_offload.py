"""Activations on the host: the same bits, all of a block's memory once, two units back at a time."""

import pytest
import torch

from raymega.config.schema import MemorySection
from raymega.model.layers import activation_offload
from raymega.model.layers.activation_offload import ActivationOffloader
from raymega.parallel.core.host_copies import HostMemory
from tests.support.references import plain_models
from tests.support.saved_tensor_bytes import SavedBytes
from tests.unit.model.parts import CPU, make_stage_modules

MODEL = plain_models.make_model("llama")


class _Watched(HostMemory):
    """Bytes on their way and back, in order."""

    def __init__(self, device):
        super().__init__(device)
        self.log = []

    def start_out(self, tensor, host):
        self.log.append(("out", tensor.nbytes))
        return super().start_out(tensor, host)

    def start_in(self, host, tensor):
        self.log.append(("in", tensor.nbytes))
        return super().start_in(host, tensor)


def _backward(**memory):
    """Gradients of a stage with all blocks, and what went to the host and back."""
    watched = _Watched(CPU)
    (module,) = make_stage_modules(MODEL)
    section = MemorySection(**memory)
    module.recompute(section, watched if "activations" in section.offload else None)
    loss = module(*plain_models.draw_batch(MODEL), None)
    watched.log.append(("loss", 0))
    for i, block in module.layers.items():
        block.mlp_norm.weight.register_hook(lambda _g, i=i: watched.log.append((i, 0)))
    loss.backward()
    return [p.grad for p in module.parameters()], watched.log


@pytest.mark.parametrize(
    "recompute",
    [
        {},
        {"recompute": "selective", "recompute_parts": ("attention", "activation", "norm")},
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
    ],
    ids=["none", "selective", "full", "full-2"],
)
def test_gradients_are_equal_bit_for_bit(recompute):
    wanted, nothing = _backward(**recompute)
    found, log = _backward(offload=("activations",), **recompute)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not [step for step in nothing if step[1]]
    moved = {way: [size for w, size in log if w == way] for way in ("out", "in")}
    assert moved["out"] and sorted(moved["out"]) == sorted(moved["in"])
    if recompute.get("recompute") == "full":
        blocks = 3 if recompute.get("recompute_every") is None else 2
        assert moved["out"] == [3 * 7 * 48 * 8] * blocks  # B * S * D, an input a unit


def test_all_that_blocks_keep_leaves_once():
    _, log = _backward(offload=("activations",))
    (module,) = make_stage_modules(MODEL)
    module.recompute(MemorySection())
    x = torch.randn(7, 3, 48, dtype=torch.float64, requires_grad=True)
    sizes = []
    for block in module.layers.values():
        with SavedBytes(known=module.parameters()) as saved:
            block(x)
        known = {t.untyped_storage().data_ptr() for t in module.rope.buffers()}
        sizes += [
            t.untyped_storage().nbytes()
            for t in saved.tensors
            if t.untyped_storage().nbytes() >= activation_offload.LEAST_BYTES
            and t.untyped_storage().data_ptr() not in known
        ]
    assert sum(size for way, size in log if way == "out") == sum(sizes)


def test_a_block_comes_back_while_the_one_after_it_is_in_backward():
    _, log = _backward(offload=("activations",))
    order = [way for way, _ in log]
    per_block = order[: order.index("loss")].count("out") // 3
    back = order[order.index("loss") + 1 :]
    token_ids = [back.index(block) for block in ("2", "1", "0")]
    came = [back[:mark].count("in") for mark in token_ids]
    assert came == [2 * per_block, 3 * per_block, 3 * per_block]


def test_memory_that_is_used_again_while_a_unit_runs_is_not_mistaken():
    host = ActivationOffloader(HostMemory(CPU))

    def unit(x):
        for _ in range(4):  # each square saves its input, whose memory comes free here
            x = (x + 1).square()
        return x

    x = torch.linspace(0, 1, 512, dtype=torch.float64, requires_grad=True)
    host.run(lambda: unit(x), []).sum().backward()
    again = x.detach().clone().requires_grad_()
    unit(again).sum().backward()
    assert torch.equal(x.grad, again.grad)
