"""Checks, before any worker starts, that a run can start from a checkpoint's weights, or can resume.

A start takes weights only: no moments and no position in the data. The job's rules say which weights
(``plan/init_from_rules.py``); a tensor that they leave open is refused. ``load/reader.py`` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.manifest import Manifest, broken_files, find_restore
from raymega.checkpoint.load.fingerprint import overwritten_start_faults
from raymega.checkpoint.tools.inspection import open_root
from raymega.config.fields import by_path
from raymega.config.lora import LoraSection
from raymega.config.schema import CheckpointSection, FunctionField, ModelSection
from raymega.errors import Fault, RaymegaError, first_few
from raymega.plan.adapters import is_adapter
from raymega.plan.init_from_rules import (
    CHANGED,
    IGNORE,
    LAST_STEP,
    REINIT,
    RENAME,
    init_names,
    is_reinitialised,
    is_same_by_layer,
    matches,
)
from raymega.plan.rename_rules import make_renames
from raymega.plan.tensor_table import model_tensors, saved_tensors
from raymega.plan.upcycling import Upcycling, make_upcycling, upcycling_faults
from raymega.storage.store import Store

WEIGHTS = "model"
"""Kind of a checkpoint's tensors that are weights: their saved names are ``model/NAME``."""
FIELD, ADAPTER = "checkpoint.init_from", "checkpoint.init_adapter"
SCALES = ("lora_alpha", "use_rslora")
"""Fields of model.lora that scale an adapter."""
HEAD, NEW_HEAD = "head.", "head.score.weight"
"""Begin of the names of a head's tensors, and the tensor that every head without a vocabulary has."""
UNSEEN_IN_SHAPES = {
    "num_heads": ("layers.*.attention.*",),
    "layer_sizes.num_heads": ("layers.*.attention.*",),
    "linear_attention.num_key_heads": ("layers.*.linear_attention.*",),
    "vision.num_heads": ("vision.layers.*",),
    "vocab_size": ("embedding.tokens.*", "head.*"),
}
"""Fields that give tensors of one shape another meaning, with their patterns: heads split features, padded rows are no tokens."""

Shape = tuple[int, ...]


def start_faults(section: CheckpointSection, model: ModelSection) -> list[Fault]:
    """Return the faults that keep a run of ``model`` from starting as ``section`` says."""
    found = open_whole(section.init_from)
    return found if isinstance(found, list) else unlike_faults(section, model, found)


def open_whole(uri: str) -> Manifest | list[Fault]:
    """Return the manifest of the checkpoint at ``uri``, or the faults that keep it from being read."""
    try:
        store, manifest = open_root(uri)
        broken = list(broken_files(store, manifest).values())
    except RaymegaError as error:
        return [_fault(uri, each.fact, each.rule, each.remedy) for each in error.faults]
    return broken or manifest


def unlike_faults(
    section: CheckpointSection, model: ModelSection, manifest: Manifest
) -> list[Fault]:
    """Return the faults of a whole checkpoint that is of another model than a run of ``model`` starts from."""
    # Rules, names and shapes first; fields that no shape shows only when all of these are right.
    saved, wanted = _weight_shapes(manifest), _shapes_of(model)
    upcycling = upcycling_of(manifest, section, model)
    faults = _idle_faults(section, saved, wanted)
    if section.init_upcycle:
        faults += upcycling_faults(upcycling, _given(section, saved), wanted)
    faults += _tensor_faults(section, saved, wanted, upcycling, has_head=model.head.is_on)
    if section.init_adapter != "none":
        faults += _adapter_faults(section.init_adapter, section.init_from, model)
    return faults or _field_faults(section, manifest, model)


def _adapter_faults(uri: str, base: str, model: ModelSection) -> Iterator[Fault]:
    """Return the faults of ``checkpoint.init_adapter``: it has the factors of this model's adapters."""
    try:
        manifest = open_root(uri).manifest
    except RaymegaError as error:
        yield from (replace(each, fact=f"{ADAPTER}={uri!r}: {each.fact}") for each in error.faults)
        return
    saved = {n: s for n, s in _weight_shapes(manifest).items() if not matches(n, LAST_STEP)}
    yield from _function_faults(manifest, model, *SCALES)
    yield from overwritten_start_faults(manifest, base)
    # of what is trained beside adapters, a start takes what is there
    own = {t.name: t.shape for t in saved_tensors(model) if is_adapter(t.name) or t.name in saved}
    unlike = _unlike(saved, own)
    if unlike:
        yield Fault(
            fact=f"{ADAPTER}={uri!r} holds {first_few(unlike, 2)}",
            rule="it has the adapters of model.lora, of one rank and on the same layers, and weights of model.train",
            remedy="set model.lora as the adapters were trained with, and model.train: `raymega checkpoint show` tells both",
        )


def _function_faults(manifest: Manifest, model: ModelSection, *fields: str) -> Iterator[Fault]:
    """Return the faults of fields that change what adapters compute, and that no shape shows."""
    made_with = manifest.job.get("model")
    lora = made_with.get("lora") if isinstance(made_with, dict) else None
    if not lora or not model.lora.r:
        return
    for field in fields:
        # what a checkpoint of an older release does not say was the default
        then, now = lora.get(field, getattr(LoraSection(), field)), getattr(model.lora, field)
        if then != now:
            yield Fault(
                fact=f"model.lora.{field}={now}: the adapters in {manifest.key} were trained with {then}",
                rule="with it the same factors compute something else than what they were trained for",
                remedy=f"set model.lora.{field}={then}",
            )


def resume_faults(
    store: Store, model: ModelSection, *, micro_batch_size: int, fp8: str = "none"
) -> Iterator[Fault]:
    """Return the faults that keep a run of ``model`` from resuming at its newest whole checkpoint."""
    try:
        manifest = find_restore(store).manifest
    except RaymegaError:  # reported by the driver, which knows what the run has saved
        return
    if manifest is None or not manifest.shapes:
        return
    own = {tensor.name: tensor.shape for tensor in saved_tensors(model)}
    unlike = _unlike(_weight_shapes(manifest), own)
    if not unlike:
        # codes of the base are other weights than their source
        yield from _function_faults(manifest, model, *SCALES, "base_dtype")
        yield from _micro_batch_faults(manifest, model, micro_batch_size, fp8)
        return
    # The tensors differ: name the fields of the model section that were changed.
    saved, asked = manifest.job.get("model"), by_path(model.model_dump(mode="json"))
    before = by_path(saved) if isinstance(saved, dict) else {}
    changed = [f"model.{name}={asked[name]}" for name in asked if before.get(name) != asked[name]]
    yield Fault(
        fact=f"{first_few(changed, 3)}: {store.uri}/{manifest.key} holds {first_few(unlike, 2)}",
        rule="a run resumes with the model that it began with",
        remedy="set the model section back, or begin another run with --set run.name=NAME; there "
        "checkpoint.init_from takes what is common",
    )


def _micro_batch_faults(
    manifest: Manifest, model: ModelSection, size: int, fp8: str
) -> Iterator[Fault]:
    """Return the fault of another micro-batch size, where the size changes what the run computes.

    It does where experts' capacity, their load balancing or a float8 scale are taken per micro-batch.
    """
    before, fp8_before = (
        _saved_field(manifest, "schedule", "micro_batch_size", size),
        _saved_field(manifest, "precision", "fp8", "none"),
    )
    if before == size:
        return
    if model.moe.depends_on_micro_batch_size:
        what = (
            f"model.moe.load_balancing_type={model.moe.load_balancing_type} and model.moe.capacity_factor="
            f"{model.moe.capacity_factor:g} routing depends on the tokens"
        )
    elif fp8 == fp8_before == "tensorwise":
        what = "precision.fp8=tensorwise each scale is of a tensor"
    else:
        return
    yield Fault(
        fact=f"schedule.micro_batch_size={size}: the run has trained with {before} up to step "
        f"{manifest.step}",
        rule=f"with {what} of one micro-batch, so another size would change the results",
        remedy=f"set schedule.micro_batch_size={before}, or give another run.name; there "
        "checkpoint.init_from takes the weights",
    )


def _saved_field(manifest: Manifest, section: str, name: str, default: Any) -> Any:
    fields = manifest.job.get(section)
    return fields.get(name, default) if isinstance(fields, dict) else default


def starting_manifest(
    manifest: Manifest, section: CheckpointSection, model: ModelSection
) -> Manifest:
    """Return the manifest as if its weights had been saved under the names of this run's model.

    With upcycling, a box of a dense layer is listed once for each expert that copies it.
    """
    names = init_names(section, _weight_shapes(manifest))
    upcycling, wanted = upcycling_of(manifest, section, model), _shapes_of(model)
    experts = {old: new for new, old in upcycling.sources.items()}
    boxes: list[SavedBox] = []
    for box in manifest.boxes:
        name = names.get(_weight_name(box.tensor), "")
        # An expert's box refers to the dense layer's bytes, at the expert's place in its tensor.
        if name in experts:
            new = experts[name]
            boxes += (
                replace(box, tensor=f"{WEIGHTS}/{new}", global_shape=wanted[new], box=placed)
                for placed in upcycling.boxes(new, box.box, wanted[new])
            )
        elif name:
            boxes.append(replace(box, tensor=f"{WEIGHTS}/{name}"))
    return replace(manifest, boxes=tuple(boxes))


def source_blocks(
    manifest: Manifest, section: CheckpointSection, model: ModelSection, taken: Collection[str]
) -> dict[str, list[Box]]:
    """Return the saved tensors, whole, that become the weights ``taken``, by saved name."""
    shapes = _weight_shapes(manifest)
    upcycling = upcycling_of(manifest, section, model)
    experts = {old: new for new, old in upcycling.sources.items()}
    names = init_names(section, shapes)
    return {
        f"{WEIGHTS}/{old}": [Box.whole(shapes[old])]
        for old, name in names.items()
        if experts.get(name, name) in taken
    }


def upcycling_of(manifest: Manifest, section: CheckpointSection, model: ModelSection) -> Upcycling:
    """Return the experts of ``model`` that start as dense layers; none without ``init_upcycle``."""
    given = _given(section, _weight_shapes(manifest)) if section.init_upcycle else {}
    return make_upcycling(model.moe, given, _shapes_of(model))


def _given(section: CheckpointSection, saved: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the checkpoint's weights that are not ignored, by the run's names."""
    return {new: saved[old] for old, new in init_names(section, saved).items()}


def _weight_shapes(manifest: Manifest) -> dict[str, Shape]:
    """Return the global shape of each weight, by its name without the kind."""
    shapes = {_weight_name(name): shape for name, shape in manifest.shapes.items()}
    # Moments and other state, which _weight_name gives the empty name.
    shapes.pop("", None)
    return shapes


def _weight_name(saved: str) -> str:
    """Return the name of a weight without its kind; empty for a tensor that is not a weight."""
    kind, _, name = saved.partition("/")
    return name if kind == WEIGHTS else ""


def _shapes_of(model: ModelSection) -> dict[str, Shape]:
    """Return the shapes of what a run starts with: all weights but adapters, which start anew."""
    return {t.name: t.shape for t in model_tensors(model) if not is_adapter(t.name)}


def _unlike(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """Return descriptions of the tensors that are missing, of another shape, or not the model's."""
    return [
        f"{name} as {saved.get(name, 'nothing')} instead of {shape}"
        for name, shape in wanted.items()
        if saved.get(name) != shape
    ] + [f"{name}, which this model lacks" for name in sorted(saved.keys() - wanted.keys())]


def _idle_faults(
    section: CheckpointSection, saved: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> list[Fault]:
    """Return the faults of rules that match no tensor, most likely because of a misspelling."""
    # Only the first rename rule that fits a tensor applies; at_work has the indices of such rules.
    left = [name for name in saved if not matches(name, section.init_ignore)]
    renames = make_renames(section.init_rename)
    at_work = {next((i for i, r in enumerate(renames) if r.apply(at)), -1) for at in left}
    idle = [
        (IGNORE, pattern, "of the checkpoint")
        for pattern in section.init_ignore
        if not any(matches(name, [pattern]) for name in saved)
    ]
    idle += [
        (REINIT, pattern, "of this model")
        for pattern in section.reinit
        if not any(matches(name, [pattern]) for name in wanted)
    ]
    idle += [
        (RENAME, rule, "of the checkpoint that is not ignored or renamed by a rule before it")
        for i, rule in enumerate(section.init_rename)
        if i not in at_work
    ]
    return [
        Fault(
            fact=f"{field} has {text!r}, which fits no tensor {whose}",
            rule="a rule that does nothing is a mistake",
            remedy="correct or remove it; `raymega checkpoint show` lists a checkpoint's tensors",
        )
        for field, text, whose in idle
    ]


def _tensor_faults(
    section: CheckpointSection,
    saved: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    upcycling: Upcycling,
    *,
    has_head: bool,
) -> Iterator[Fault]:
    # Two tensors of the checkpoint that the rules give one name.
    names = init_names(section, saved)
    met = Counter(names.values())
    for new, count in met.items():
        if count > 1:
            yield _fault(
                section.init_from,
                f"{' and '.join(old for old in names if names[old] == new)} are both {new} here",
                "a tensor has one source",
                f"correct {RENAME}, or put one of them into {IGNORE}",
            )
    # Not compared by shape: initial values, routers of new experts, and both sides of upcycling.
    apart = {name for name in wanted if is_reinitialised(section, name)} | upcycling.routers
    apart |= {*upcycling.sources, *upcycling.sources.values()}
    given = {new: saved[old] for old, new in names.items() if new not in apart}
    taken = {name: shape for name, shape in wanted.items() if name not in apart}
    unlike = _unlike(given, taken)
    lacking, beside = sorted(taken.keys() - given.keys()), sorted(given.keys() - taken.keys())
    is_of_head = all(name.startswith(HEAD) for name in (*lacking, *beside))
    is_new = NEW_HEAD in lacking or (has_head and beside and not lacking)
    if is_new and is_of_head and len(unlike) == len(lacking) + len(beside):
        yield _other_head(section, lacking, beside)
    elif unlike:
        yield _other_model(section.init_from, f"holds {first_few(unlike)}")


def _field_faults(
    section: CheckpointSection, manifest: Manifest, model: ModelSection
) -> list[Fault]:
    """Return the faults of model fields that differ although all shapes agree.

    A checkpoint that does not record its model section is accepted as it is.
    """
    made_with = manifest.job.get("model")
    then = by_path(made_with) if isinstance(made_with, dict) else {}
    now = by_path(model.model_dump(mode="json"))
    # In a dense checkpoint the fields of experts had no effect.
    if not then.get("moe.num_experts"):
        then = {field: value for field, value in then.items() if not field.startswith("moe.")}
    # A language model's head pools nothing, and an encoder without a head chooses nothing.
    if {"language_model", "none"} & {then.get("head.kind"), now["head.kind"]}:
        then.pop("head.pooling", None)
    taken = [name for name in _shapes_of(model) if not is_reinitialised(section, name)]
    facts = {
        field: f"was made with model.{field}={then[field]}, not {now[field]}"
        for field in (*UNSEEN_IN_SHAPES, *get_args(FunctionField))
        if then.get(field, now[field]) != now[field] and not is_same_by_layer(field, then, now)
    }
    return [
        _other_model(section.init_from, facts[field])
        for field, patterns in UNSEEN_IN_SHAPES.items()
        if field in facts and any(matches(name, patterns) for name in taken)
    ] + [
        _other_function(section.init_from, field, facts[field])
        for field in get_args(FunctionField)
        if field in facts and field not in section.allow_changed
    ]


def _other_function(uri: str, field: str, fact: str) -> Fault:
    rule = "with it the same weights compute something else than what they were trained for"
    remedy = f"set model.{field} back, or {CHANGED}=[{field}] if it is meant"
    return _fault(uri, fact, rule, remedy)


def _other_head(section: CheckpointSection, new: Sequence[str], left: Sequence[str]) -> Fault:
    """Return the fault of a checkpoint that differs in its head alone: tensors that it lacks, and that it has beside."""
    parts = {
        REINIT: [*section.reinit, *new] if new else [],
        IGNORE: [*section.init_ignore, *left] if left else [],
    }
    remedy = " ".join(f"{field}=[{','.join(names)}]" for field, names in parts.items() if names)
    return _fault(
        section.init_from,
        f"its head differs: it lacks {first_few(new) or 'nothing'}, and has {first_few(left) or 'nothing'} beside",
        "a new head begins with initial values, and the job says which tensors do",
        f"set {remedy}",
    )


def _other_model(uri: str, fact: str) -> Fault:
    rule = "its weights must be those of the job's model section, except where the job's rules say otherwise"
    remedy = "use the model section that it was made with, which `raymega checkpoint show` tells, or say by "
    return _fault(uri, fact, rule, f"{remedy}{RENAME}, {REINIT} and {IGNORE} what belongs where")


def _fault(uri: str, fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=f"{FIELD}={uri!r}: {fact}", rule=rule, remedy=remedy)
