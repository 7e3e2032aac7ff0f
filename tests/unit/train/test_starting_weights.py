"""Checkpoints of others at a start: what is wrong with them is no fault of the run's own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raymega.checkpoint.format.keys import CheckpointId, manifest_key
from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import CheckpointSection
from raymega.convert.tuned.adapted_weights import merged_model
from raymega.errors import StorageError
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.distillation.teacher import load_teacher
from raymega.train.start.weights import init_from, load_codes
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE
from tests.unit.convert.folders import write_checkpoint

LORA = SimpleNamespace(job=SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(r=0))))


@pytest.mark.parametrize("field", ["init_from", "init_adapter", "codes", "teacher_checkpoint"])
def test_damage_of_anothers_checkpoint_is_told_as_such(field, tmp_path):
    """The driver passes the run's newest checkpoint over when a rank raises CheckpointError at its start."""
    uri = str(tmp_path / "theirs")
    open_store(uri).put(manifest_key(CheckpointId(attempt=1, step=100)), [b"{"], overwrite=True)
    parts = SimpleNamespace(
        optimizer=SimpleNamespace(blocks=list), plan=LORA, weights=SimpleNamespace(coded={})
    )
    with pytest.raises(StorageError, match=rf"{field.replace('codes', 'init_from')}='{uri}': "):
        if field == "teacher_checkpoint":
            load_teacher(SimpleNamespace(blocks=list), uri)
        elif field == "codes":
            parts.weights.coded = {0: SimpleNamespace(bucket=SimpleNamespace(spans=()))}
            load_codes(parts, CheckpointSection(init_from=uri))
        else:
            init_from(parts, CheckpointSection(**{field: uri}))


def test_adapters_start_with_what_their_run_trained_beside_them(tmp_path):
    lora = "model.lora={r: 2, target_modules: [attention.q]}"
    plan = make_test_plan(lora, "model.train=['*norm*']", *layout_overrides("tp1"))
    model, device = plan.job.model, torch.device("cpu")
    base = write_checkpoint(str(tmp_path / "base"), merged_model(model))
    section = CheckpointSection(
        init_from=base,
        init_adapter=write_checkpoint(str(tmp_path / "adapters"), model, base=base, seed=4),
    )
    assert start_faults(section, model) == []
    parts = build_parts(plan, rank=0, groups=ALONE, device=device)
    init_from(parts, section)
    held, adapters = {}, open_checkpoint(section.init_adapter)
    for block in parts.optimizer.blocks():
        held.setdefault(block.name, torch.zeros(block.tensor.shape, dtype=torch.float64))[
            block.box.within(block.tensor.whole)
        ] = block.values
    for name in adapters.names:
        np.testing.assert_array_equal(held[name].numpy(), adapters.read(name), err_msg=name)
    # norms that the run does not train would be those of the base
    (fault,) = start_faults(section, model.model_copy(update={"train": ()}))
    assert "norm.weight" in fault.fact and "and model.train" in fault.remedy
