"""A folder of torch's that is read by the wrong names or rules is refused, not taken otherwise."""

import pytest

from raymega.convert.torch_dcp.importer import Reading, dcp_import
from raymega.errors import ConfigError
from tests.unit.convert.torch_dcp.test_round_trip import MODEL as SHAPE
from tests.unit.convert.torch_dcp.test_round_trip import NOW, dcp_save, draw_state

MODEL = SHAPE.model_copy(update={"make_vocab_size_divisible_by": 1})


@pytest.mark.parametrize(
    ("reading", "facts"),
    [
        ({"names": "torchtitan", "model": MODEL}, ["the folder has model.layers.0.attention"]),
        ({"rename": ("block.*=layers.*",)}, ["'block.*=layers.*' fits no weight"]),
        ({"ignore": ("lr_schedule.*",)}, ["'lr_schedule.*' fits no entry"]),
        (
            {"rename": ("block.*=layers.*",), "ignore": ("lr_schedule.*",)},
            ["'block.*=layers.*' fits no weight", "'lr_schedule.*' fits no entry"],
        ),
    ],
    ids=["names", "rename", "ignore", "both"],
)
def test_wrong_names_and_rules_that_fit_nothing_are_refused(tmp_path, reading, facts):
    dcp_save(draw_state(MODEL), tmp_path / "theirs")
    with pytest.raises(ConfigError) as caught:
        dcp_import(
            tmp_path / "theirs", str(tmp_path / "ours"), Reading(position={}, **reading), created=NOW
        )  # fmt: skip
    assert all(fact in str(caught.value) for fact in facts)
    assert not (tmp_path / "ours" / "checkpoints").exists()
