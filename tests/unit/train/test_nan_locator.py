"""What a step refuses: state that is no finite number never reaches a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from raymega.errors import NumericsError
from raymega.train import nan_locator
from raymega.train.module_hooks import TensorObservation
from raymega.train.nan_locator import refuse_non_finite_state


def _parts(values):
    tensor = SimpleNamespace(name="layers.0.mlp.up.weight")
    blocks = [
        SimpleNamespace(kind=kind, tensor=tensor, values=block)
        for kind, block in (("model", torch.ones(2)), ("adam.exp_avg_sq", values))
    ]
    return SimpleNamespace(optimizer=SimpleNamespace(blocks=lambda: blocks))


def test_finite_state_passes():
    refuse_non_finite_state(_parts(torch.ones(3)), 7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_state_that_is_not_finite_is_named_with_its_step(bad):
    with pytest.raises(NumericsError, match=r"after step 7: adam.exp_avg_sq of layers.0.mlp.up"):
        refuse_non_finite_state(_parts(torch.tensor([1.0, bad])), 7)


def test_of_ranks_of_a_stage_the_one_whose_module_comes_first_is_told():
    stages = SimpleNamespace(stages_of=lambda _: [SimpleNamespace(index=1)])
    first = []
    for rank, bad in enumerate(("mlp", "norm")):
        world = SimpleNamespace(index=rank)
        search = nan_locator._Search(
            SimpleNamespace(plan=stages, groups=SimpleNamespace(world=world))
        )
        for name in ("norm", "attention", "mlp"):
            tensor = torch.full((2,), float("nan") if name == bad else 1.0)
            search.see(
                TensorObservation(
                    kind="output", name=name, chunk=0, micro_batch=0, samples=tensor, tensor=tensor
                )
            )
        first.append(search.first)
    assert [each.name for each in first] == ["mlp", "norm"]
    assert first[1].order < first[0].order
