"""Dialects of names: a model that the other side cannot build is refused."""

from raymega.config.attention import AttentionSection
from raymega.convert.torch_dcp.names import dialect_faults
from tests.support.references import plain_models


def test_parts_that_torchtitan_lacks_are_refused():
    plain = plain_models.make_model("llama")
    windows = AttentionSection(layer_types=("sliding",), sliding_window=4)
    with_windows = plain.model_copy(update={"attention": windows})
    assert not list(dialect_faults("torchtitan", plain))
    assert not list(dialect_faults("raymega", with_windows))
    (fault,) = dialect_faults("torchtitan", with_windows)
    assert fault.fact == "--names torchtitan with model.attention or model.multipliers"
