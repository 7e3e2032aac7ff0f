"""Checkpoints of others at a start: what is wrong with them is no fault of the run's own."""

from types import SimpleNamespace

import pytest

from raymega.checkpoint.format.keys import CheckpointId, manifest_key
from raymega.config.schema import CheckpointSection
from raymega.errors import StorageError
from raymega.storage.registry import open_store
from raymega.train.distillation.teacher import load_teacher
from raymega.train.start.weights import init_from, load_codes

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
