"""Whether a run can start with the weights of a checkpoint: asked before anything starts.

Weights alone: no moments, no position. Reading them is the reader's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from raymega.checkpoint.inspection import open_checkpoint
from raymega.checkpoint.manifest import Manifest, broken_files
from raymega.config.schema import ModelSection
from raymega.errors import Fault, RaymegaError
from raymega.messages import SavedBox
from raymega.plan.tensors import model_tensors

WEIGHTS = "model"
"""Kind of the weights among what a checkpoint holds."""
FIELD = "checkpoint.start_from"
NUM_NAMED = 5
UNSEEN_IN_SHAPES = ("num_heads", "vocab_size")
"""Fields of the model that say what the elements are, and that other numbers may have in common:
features are so many heads, and rows behind the vocabulary are padding, which stays zero."""


def start_faults(uri: str, model: ModelSection) -> list[Fault]:
    """What keeps a run of ``model`` from starting with the newest checkpoint at ``uri``."""
    try:
        store, manifest = open_checkpoint(uri)
        broken = list(broken_files(store, manifest).values())
    except RaymegaError as error:
        return [_fault(uri, str(error), "it must name a checkpoint", "give another URI, or none")]
    if broken:
        return broken
    faults = _tensor_faults(uri, manifest.tensors(), model)
    return faults or _field_faults(uri, manifest, model)


def _tensor_faults(
    uri: str, saved: Mapping[str, Sequence[SavedBox]], model: ModelSection
) -> list[Fault]:
    shapes = {name: boxes[0].global_shape for name, boxes in saved.items()}
    unlike = [
        f"{tensor.name} as {shapes.get(name, 'nothing')} instead of {tensor.shape}"
        for tensor in model_tensors(model)
        if shapes.get(name := f"{WEIGHTS}/{tensor.name}") != tensor.shape
    ]
    wanted = {f"{WEIGHTS}/{tensor.name}" for tensor in model_tensors(model)}
    unlike += [
        f"{PurePath(name).name}, which this model lacks,"
        for name in sorted(shapes.keys() - wanted)
        if name.startswith(f"{WEIGHTS}/")
    ]
    if not unlike:
        return []
    more = f" and {len(unlike) - NUM_NAMED} more" if len(unlike) > NUM_NAMED else ""
    return [_other_model(uri, f"holds {', '.join(unlike[:NUM_NAMED])}{more}")]


def _field_faults(uri: str, manifest: Manifest, model: ModelSection) -> list[Fault]:
    """What shapes do not tell; a checkpoint whose model is not known is taken as it is."""
    made_with = manifest.job.get("model")
    then = made_with if isinstance(made_with, dict) else {}
    now = model.model_dump(mode="json")
    return [
        _other_model(uri, f"was made with model.{field}={then[field]}, not {now[field]}")
        for field in UNSEEN_IN_SHAPES
        if then.get(field, now[field]) != now[field]
    ]


def _other_model(uri: str, fact: str) -> Fault:
    rule = "its weights must be those of the job's model section"
    remedy = "use the model section that it was made with; `raymega checkpoint show` tells"
    return _fault(uri, fact, rule, remedy)


def _fault(uri: str, fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=f"{FIELD}={uri!r}: {fact}", rule=rule, remedy=remedy)
