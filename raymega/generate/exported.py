"""Folder of a checkpoint as transformers loads it: a temporary one, or one that is kept and used again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.native import tuned_model_of
from raymega.convert.tuned.merge import NO_BASE, whole_weights
from raymega.errors import ConfigError
from raymega.evaluate.run import EvalOptions, plan_of
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.run_plan import RunPlan

MARK = "raymega_export.json"
"""File that says which checkpoint a folder holds."""
SHORTEST_ROW = 2
"""Tokens of the shortest legal row, where no row is read."""

STREAMS = (
    "model.encoder_decoder.decoder_seq_len=3", "data.seq_len=6", "data.packing=none", "data.document_multiple=1",
    "data.span_corruption.text_seq_len=2", "data.span_corruption.num_sentinels=1", "data.span_corruption.eos_token_id=0",
)  # fmt: skip
"""A legal row of two streams, where no row is read."""


@contextmanager
def exported(
    checkpoint: Checkpoint, *, dtype: str, folder: Path | None, base: str = NO_BASE
) -> Iterator[Path]:
    """Yield a folder that holds the model of ``checkpoint`` in the number format ``dtype``.

    Args:
        checkpoint: Checkpoint of a run, or of a converted model.
        dtype: Number format of the weights.
        folder: Folder to keep; used again if it holds this checkpoint. None is a temporary one.
        base: Weights under adapters, which are merged into them; ``none`` without adapters.

    Raises:
        ConfigError: The folder holds something else, or transformers has no such model.
    """
    if folder is not None:
        keep_export(checkpoint, dtype=dtype, folder=folder, base=base)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="raymega-export-") as place:
        keep_export(checkpoint, dtype=dtype, folder=Path(place) / "model", base=base)
        yield Path(place) / "model"


def keep_export(checkpoint: Checkpoint, *, dtype: str, folder: Path, base: str = NO_BASE) -> None:
    """Export ``checkpoint`` to ``folder``, unless it is there already; adapters merged into their ``base``.

    Raises:
        ConfigError: The folder holds something else, or transformers has no such model.
    """
    wanted = _identity(checkpoint, dtype) | ({"base": base} if base != NO_BASE else {})
    mark = folder / MARK
    if mark.is_file():
        found = json.loads(mark.read_text(encoding="utf-8"))
        if found == wanted:
            return
        raise ConfigError(
            fact=f"--folder {folder} holds {found.get('checkpoint')} in {found.get('dtype')}",
            rule=f"it must be empty, or hold {wanted['checkpoint']} in {dtype}",
            remedy="give another --folder",
        )
    # this very checkpoint: a run under way may have a newer one by now
    with whole_weights(checkpoint, base) as source:
        hf_export(source, folder, dtype=dtype)
    mark.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


def one_device_plan(checkpoint: Checkpoint, overrides: Sequence[str]) -> RunPlan:
    """Return the plan of a checkpoint's model on one device, for its number format and device.

    Raises:
        ConfigError: A text of ``overrides`` is wrong.
    """
    model = tuned_model_of(checkpoint.manifest)
    rows = STREAMS if parts_of(model).is_encoder_decoder else ()
    last = [f"data.span_corruption.first_sentinel_id={model.vocab_size - 1}"] if rows else []
    # an image is shorter than a row, which document_multiple divides
    shortest = SHORTEST_ROW * (1 + model.vision.num_patches // SHORTEST_ROW)
    options = EvalOptions(
        overrides=(*rows, *last, *overrides), seq_len=shortest, is_for_export=True
    )
    return plan_of(checkpoint, options)


def default_folder(checkpoint: Checkpoint, *, dtype: str) -> Path:
    """Return the folder below ~/.raymega in which the export of a checkpoint is kept for an engine."""
    identity = json.dumps(_identity(checkpoint, dtype), sort_keys=True).encode()
    digest = blake2b(identity, digest_size=4).hexdigest()
    name = f"{model_name(checkpoint)}-step-{checkpoint.step}-{digest}"
    return Path.home() / ".raymega" / "exports" / name


def model_name(checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint's model: the last part of its run's URI."""
    return checkpoint.store.uri.rstrip("/").rpartition("/")[2] or "model"


def _identity(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    store, manifest = checkpoint
    uri = f"{store.uri}/{manifest.key}"
    return {"checkpoint": uri, "created": manifest.created, "dtype": dtype}
