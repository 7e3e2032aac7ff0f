"""Masters and state on the host: the same bits, gone from the device but while they are updated."""

import pytest
import torch

from raymega.config.schema import OptimizerSection
from raymega.optim import optimizer
from raymega.optim.cpu_offload import HostState
from tests.support.params import make_optimizer, make_param, make_tensor

FORMATS = ("master", "bfloat16", "8bit")


class _Trainer:
    def __init__(self, form, *, is_on_host, dtype=torch.bfloat16):
        self.params = [
            make_param(make_tensor(name, shape), dtype=dtype)
            for name, shape in {"a": (64, 70), "b": (33, 64), "c": (20, 300)}.items()
        ]
        section = OptimizerSection(lr=1e-2, state_dtype=form)
        self.buffer, self.weights, self.optimizer = make_optimizer(
            self.params, section, bucket_bytes=4096, is_on_host=is_on_host
        )

    def train(self, steps):
        for step in steps:
            source = torch.Generator().manual_seed(step)
            for param in self.params:
                self.buffer.view(param).copy_(torch.randn(param.shape, generator=source))
            self.optimizer.step(lr=1e-2, step=step + 1)

    def values(self):
        """Whole tensors: weights, masters, state as it is kept and as it is read."""
        found = {i: p.detach().clone() for i, p in enumerate(self.params)}
        for name, blocks in (("kept", self.optimizer.blocks()), ("read", self.optimizer.values())):
            for block in blocks:
                values = block.values.clone()
                key = (name, block.kind, block.tensor.name, values.dtype)
                whole = found.setdefault(key, torch.zeros(block.tensor.shape, dtype=values.dtype))
                whole[block.box.within(block.tensor.whole)] = values
        return found


def _assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values), key


@pytest.fixture(autouse=True)
def _portions_end_inside_buckets(monkeypatch):
    monkeypatch.setattr(optimizer, "PORTION_ELEMENTS", 1000)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_are_equal_bit_for_bit(form, dtype):
    wanted, found = (_Trainer(form, is_on_host=on, dtype=dtype) for on in (False, True))
    for trainer in (wanted, found):
        trainer.train(range(3))
    _assert_equal(found.values(), wanted.values())


def test_a_run_goes_on_from_what_was_loaded():
    trained, other = (_Trainer("master", is_on_host=True) for _ in range(2))
    trained.train(range(2))
    for block, source in zip(other.optimizer.blocks(), trained.optimizer.blocks(), strict=True):
        block.values.copy_(source.values)
    other.optimizer.sync_weights()
    _assert_equal(other.values(), trained.values())
    for trainer in (trained, other):
        trainer.train(range(2, 4))
    _assert_equal(other.values(), trained.values())


def test_values_that_numpy_views_hold_no_later_update_up():
    trainer = _Trainer("master", is_on_host=True)
    trainer.train(range(2))
    viewed = [(each.values.numpy(), each.values.clone()) for each in trainer.optimizer.values()]
    trainer.train(range(2, 3))
    assert viewed and all((values == copy.numpy()).all() for values, copy in viewed)


def test_portions_are_equal_and_those_in_blocks_whole():
    for form, sizes in (("master", [1000] * 12 + [592]), ("8bit", [6000, 2112, 4480])):
        made = _Trainer(form, is_on_host=True).optimizer._update_chunks
        assert [sum(each.master.numel() for each in chunk) for chunk in made] == sizes


def test_each_master_is_counted_once():
    trainers = [_Trainer("master", is_on_host=on) for on in (False, True)]
    counted = []
    for trainer in trainers:
        sums = dict.fromkeys("abc", 0.0)
        for tensor, values in trainer.optimizer.shares():
            sums[tensor.name] += float(values.double().square().sum())
        counted.append(sums)
    assert counted[0] == pytest.approx(counted[1], rel=1e-12)


def test_two_portions_are_here_and_the_others_gone():
    update_chunks = [[torch.arange(8.0) + 10 * i, torch.ones(4)] for i in range(4)]
    views = [numbers[2:6] for numbers, _ in update_chunks]
    state = HostState(torch.device("cpu"))
    for tensors in update_chunks:
        state.add(tensors)
    here = [[t.untyped_storage().nbytes() > 0 for t, _ in update_chunks]]
    for number in state.turns():
        here.append([t.untyped_storage().nbytes() > 0 for t, _ in update_chunks])
        update_chunks[number][0].mul_(2)
    assert here == [
        [False, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
        [False, False, False, True],
    ]
    for number, view in enumerate(views):
        half = state.on_host(view)
        assert torch.equal(half, 2 * (torch.arange(8.0) + 10 * number)[2:6])
    with state.all_here():
        assert update_chunks[3][0][0] == 60
