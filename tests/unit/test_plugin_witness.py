"""Loss, optimizer and family of the package that docs/extending.md shows, against outside witnesses."""

import sys

import pytest
import torch

from raymega import plugins
from raymega.config.schema import OptimizerSection, PluginsSection
from raymega.convert.huggingface.config import config_from, model_from
from raymega.convert.huggingface.names import hf_tensors
from raymega.optim.updates import ParamState, make_update_group, update_code
from raymega.parallel.tensor_parallel.cross_entropy import LossTerms
from raymega.parallel.tensor_parallel.vocab_logits import VocabLogits
from tests.support.outside_package import STABLELM, write_package
from tests.support.params import ALONE


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    """The plug-ins section of a job with the package."""
    folder = write_package(tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(plugins, "_PARTS", dict(plugins._PARTS))
        yield PluginsSection(modules=("acme.plugins",))
    plugins.registry_of.cache_clear()
    plugins._loaded.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def test_focal_loss_is_the_paper_s_on_torch_s_own_softmax(section):
    torch.manual_seed(1)
    ours = torch.randn(5, 2, 16, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.randint(0, 13, (5, 2))
    logits = VocabLogits(ours, tp=ALONE.tp, terms=LossTerms(vocab_size=13), is_fused=False)
    loss = section.code("loss", "acme.focal")(logits, labels)
    log_probs = torch.log_softmax(theirs[..., :13], -1).gather(-1, labels[..., None])[..., 0]
    expected = -((1 - log_probs.exp()) ** 2.0) * log_probs
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)


def test_nesterov_is_torch_s(section):
    torch.manual_seed(2)
    master = torch.randn(7, dtype=torch.float64)
    theirs = master.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    settings = OptimizerSection(lr=0.1, name="acme.nesterov", momentum=0.9)
    update = update_code(settings, section, "acme.nesterov")
    state = torch.zeros_like(master)
    for step in range(1, 5):
        gradient = torch.randn(7, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        slot = ParamState(param=None, master=master, gradient=gradient, state=(state,))
        update(
            make_update_group(
                [slot], step=torch.tensor(float(step)), lr=0.1, weight_decay=0.01, divisor=None
            )
        )
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-12, atol=1e-14)


def test_config_of_stablelm_is_read_and_written(section):
    model = model_from(STABLELM)
    assert model.family == "acme.stablelm" and model.attention.partial_rotary_factor == 0.5
    tuned = model.model_copy(update={"loss": "acme.focal"})
    again = config_from(tuned, dtype="float32", carried={})
    assert again["model_type"] == "stablelm" and again["layer_norm_eps"] == 1e-5
    assert again["architectures"] == ["StableLmForCausalLM"]
    assert model_from(again) == model


@pytest.mark.wide
def test_tensors_of_stablelm_are_those_of_transformers(section):
    from transformers import StableLmConfig, StableLmForCausalLM

    model = model_from(STABLELM)
    theirs = StableLmForCausalLM(StableLmConfig(**STABLELM)).state_dict()
    assert {t.name: tuple(t.shape) for t in hf_tensors(model)} == {
        name: tuple(value.shape) for name, value in theirs.items()
    }
