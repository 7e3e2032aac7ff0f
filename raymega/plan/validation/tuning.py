"""Check the rules of tuning: adapters, frozen weights, noise, pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from raymega.config.lora import LoraSection
from raymega.config.moe import MoeSection
from raymega.config.preference import PreferenceSection
from raymega.config.schema import ModelSection
from raymega.errors import Fault, first_few
from raymega.plan.adapters import FUSED, NO_LINEARS, is_adapter, is_target
from raymega.plan.layers.base_blocks import COMPUTE
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import model_tensors
from raymega.plan.validation.rule import broken_rows, reads

PREFERENCE_FIELDS = " ".join(PreferenceSection.model_fields)
PLAIN_PREFERENCE = PreferenceSection()
MODEL_FIELDS = tuple(ModelSection.model_fields)


@reads("model." + " ".join(MODEL_FIELDS))
def pattern_faults(*values: Any) -> Iterator[Fault]:
    """Check that each pattern fits a tensor, that fused parts are trained alike, and that something is trained."""
    model = ModelSection.model_construct(None, **dict(zip(MODEL_FIELDS, values, strict=True)))
    if not (model.freeze or model.train or model.lora.r):
        return
    # patterns are of the model's own weights, adapters left out
    tensors = [each for each in model_tensors(model) if not is_adapter(each.name)]
    names = [tensor.name for tensor in tensors if tensor.role != "state" and not tensor.is_carried]
    for field, patterns in (("freeze", model.freeze), ("train", model.train)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield Fault(
                    fact=f"model.{field} has {pattern!r}, which fits no tensor",
                    rule=f"tensors have names such as {names[0]} and {names[-1]}",
                    remedy=f"correct it, or remove it: --set model.{field}=[]",
                )
    yield from _target_faults(model, tensors)
    yield from _fused_faults(tensors)
    yield from _rescaled_faults(model, tensors)
    if not model.lora.r and not any(each.is_trained for each in model_tensors(model)):
        yield Fault(
            fact=f"model.freeze=[{', '.join(model.freeze)}] leaves no tensor to train",
            rule="a run trains at least one",
            remedy="freeze fewer tensors, or name some in model.train",
        )


def _target_faults(model: ModelSection, tensors: Sequence[GlobalTensor]) -> Iterator[Fault]:
    if not model.lora.r:
        return
    linears = [t for t in tensors if t.role == "matrix" and not t.name.endswith(NO_LINEARS)]
    # The default's patterns are for any model: one of them may fit nothing.
    patterns = model.lora.target_modules
    if patterns == LoraSection().target_modules and any(is_target(t, model) for t in linears):
        return
    for pattern in patterns:
        # each pattern alone, as if it were the only target
        one = model.model_copy(
            update={"lora": model.lora.model_copy(update={"target_modules": (pattern,)})}
        )
        if not any(is_target(tensor, one) for tensor in linears):
            layers = dict.fromkeys(
                ".".join(t.name.split(".")[2:-1]) for t in linears if t.name.startswith("layers.")
            )
            yield Fault(
                fact=f"model.lora.target_modules has {pattern!r}, which fits no linear layer",
                rule=f"the blocks of this model have {', '.join(layers)}",
                remedy="use some of them, or patterns such as 'attention.*'",
            )


def _rescaled_faults(model: ModelSection, tensors: Sequence[GlobalTensor]) -> Iterator[Fault]:
    """Yield the fault of a layer that is trained below DoRA, whose gradients take it for a constant."""
    if not model.lora.use_dora:
        return
    linears = {t.name.removesuffix(".weight") for t in tensors if is_target(t, model)}
    trained = [t.name for t in tensors if t.is_trained and t.name.rpartition(".")[0] in linears]
    if trained:
        yield Fault(
            fact=f"model.lora.use_dora=true, and {first_few(trained, 2)} trained by model.train",
            rule="DoRA rescales layers that are frozen, their biases included",
            remedy="take these layers out of model.train or of model.lora.target_modules",
        )


def _fused_faults(tensors: Sequence[GlobalTensor]) -> Iterator[Fault]:
    frozen = {tensor.name: tensor.is_frozen for tensor in tensors}
    for name, is_frozen in frozen.items():
        for first, *others in FUSED:
            for kind in ("weight", "bias"):
                if not name.endswith(f".{first}.{kind}"):
                    continue
                # the other parts of the same parameter, where the model has them
                start = name.removesuffix(f"{first}.{kind}")
                there = [o for o in others if f"{start}{o}.{kind}" in frozen]
                apart = [o for o in there if frozen[f"{start}{o}.{kind}"] != is_frozen]
                if apart:  # one of them tells enough
                    yield Fault(
                        fact=f"{name} is {'frozen' if is_frozen else 'trained'}, and {first_few([f'{start}{o}.{kind}' for o in apart])} "
                        f"{'trained' if is_frozen else 'frozen'}",
                        rule="they are parts of one parameter, which is trained or frozen as a whole",
                        remedy=f"let model.freeze and model.train fit all of {', '.join((first, *there))}",
                    )


@reads("model.freeze train lora")
def idle_faults(
    freeze: tuple[str, ...], train: tuple[str, ...], lora: LoraSection
) -> Iterator[Fault]:
    """Check that each field that chooses what is trained decides something."""
    if lora.r and freeze:
        yield Fault(
            fact=f"model.freeze=[{', '.join(freeze)}] with model.lora.r={lora.r}",
            rule="with adapters every other weight is frozen already, so it has no effect",
            remedy="leave model.freeze out; model.lora.target_modules chooses where adapters are",
        )
    if train and not freeze and not lora.r:
        yield Fault(
            fact=f"model.train=[{', '.join(train)}]",
            rule="it names exceptions from model.freeze or model.lora, and all weights are trained without these",
            remedy="set model.freeze=['*'] to train these alone, or leave model.train out",
        )
    plain = LoraSection()
    changed = [name for name, value in lora if value != getattr(plain, name)]
    if changed and not lora.r:
        yield Fault(
            fact=f"model.lora.{changed[0]} is set with model.lora.r=0",
            rule="there are no adapters, so it has no effect",
            remedy="set model.lora.r, or leave model.lora out: --set model.lora={}",
        )


@reads("model.lora moe, parallel.etp")
def expert_adapter_faults(lora: LoraSection, moe: MoeSection, etp: int) -> Iterator[Fault]:
    """Check that adapters of routed experts are on whole experts, and without dropout."""
    targets = [p for p in lora.target_modules if _fits_experts(p)]
    if not (lora.r and moe.num_experts and targets):
        return
    if etp > 1:
        yield Fault(
            fact=f"parallel.etp={etp} with model.lora.target_modules=[{', '.join(targets)}]",
            rule="an adapter of routed experts is on one rank with its expert",
            remedy="set parallel.etp=1, and a larger parallel.ep",
        )
    if lora.lora_dropout:
        yield Fault(
            fact=f"model.lora.lora_dropout={lora.lora_dropout:g} with target_modules=[{', '.join(targets)}]",
            rule="tokens that routed experts get are not dropped by features",
            remedy="set model.lora.lora_dropout=0, or take moe.experts out of the targets",
        )


def _fits_experts(pattern: str) -> bool:
    # a pattern may begin with the block, as in layers.3.moe.experts.up
    names = [f"moe.experts.{part}" for part in ("gate", "up", "down")]
    tails = [pattern, pattern.partition("layers.")[2].partition(".")[2] or pattern]
    return any(fnmatchcase(name, tail) for name in names for tail in tails)


@reads("model.lora, parallel.overlap_moe_expert_parallel_comm")
def overlap_faults(lora: LoraSection, overlaps: bool) -> Iterator[Fault]:  # a rule's values
    """Check that no two forwards of a rank alternate, where the keys of an adapter's dropout are its stage's."""
    if lora.r and lora.lora_dropout and overlaps:
        yield Fault(
            fact=f"parallel.overlap_moe_expert_parallel_comm=true with model.lora.lora_dropout={lora.lora_dropout:g}",
            rule="an adapter's dropout belongs to the one micro-batch that runs",
            remedy="set parallel.overlap_moe_expert_parallel_comm=false or model.lora.lora_dropout=0",
        )


@reads("model.lora, parallel.overlap_moe_expert_parallel_comm")
def base_block_faults(lora: LoraSection, overlaps: bool) -> Iterator[Fault]:  # a rule's values
    """Check that a base that is held as codes is decoded for one pass at a time, and is read as it is."""
    if not lora.r or lora.base_dtype == COMPUTE:
        return
    if overlaps:
        yield Fault(
            fact=f"parallel.overlap_moe_expert_parallel_comm=true with model.lora.base_dtype={lora.base_dtype}",
            rule="weights are decoded for one pass at a time, and let go of after it",
            remedy="set parallel.overlap_moe_expert_parallel_comm=false or model.lora.base_dtype=compute",
        )
    if lora.use_dora:
        yield Fault(
            fact=f"model.lora.use_dora=true with model.lora.base_dtype={lora.base_dtype}",
            rule="magnitudes begin as norms of the base's rows, and codes have other norms",
            remedy="set model.lora.use_dora=false or model.lora.base_dtype=compute",
        )


@reads("model.neftune_noise_alpha, parallel.dynamic_cp")
def noise_faults(alpha: float, is_dynamic: bool) -> Iterator[Fault]:  # a rule's values
    """Check that rows have one length, on which the size of the noise depends."""
    if alpha and is_dynamic:
        yield Fault(
            fact=f"model.neftune_noise_alpha={alpha:g} with parallel.dynamic_cp=true",
            rule="the noise depends on the length of a row, which dynamic context parallelism changes",
            remedy="set parallel.dynamic_cp=false or model.neftune_noise_alpha=0",
        )


@reads("model.lora, checkpoint.init_adapter init_from, run.eval_tasks eval_tasks_on")
def adapter_use_faults(
    lora: LoraSection, init_adapter: str, init_from: str, tasks: Sequence[object], tasks_on: str
) -> Iterator[Fault]:
    """Check that adapters to start with have a place and a base, and that workers beside the run find the base."""
    if init_adapter != "none" and not lora.r:
        yield Fault(
            fact=f"checkpoint.init_adapter={init_adapter!r} with model.lora.r=0",
            rule="it says what adapters start with",
            remedy="set model.lora as the adapters were trained with, or checkpoint.init_adapter=none",
        )
    elif init_adapter != "none" and init_from == "none":
        yield Fault(
            fact=f"checkpoint.init_adapter={init_adapter!r} with checkpoint.init_from=none",
            rule="adapters change the weights that they were trained on",
            remedy="set checkpoint.init_from to their base, which `raymega checkpoint show` tells",
        )
    if lora.r and tasks and tasks_on == "beside" and init_from == "none":
        yield Fault(
            fact=f"run.eval_tasks_on=beside with model.lora.r={lora.r} and checkpoint.init_from=none",
            rule="workers beside the run read its checkpoints, which have adapters alone, and their base",
            remedy="evaluate on the training ranks: run.eval_tasks_on=grid",
        )


def _section(values: Sequence[Any]) -> PreferenceSection:
    named: dict[str, Any] = dict(zip(PreferenceSection.model_fields, values, strict=True))
    return PreferenceSection.model_construct(None, **named)


@reads(f"preference.{PREFERENCE_FIELDS}")
def idle_preference_faults(*values: Any) -> Iterator[Fault]:
    """Check that each field of the section has an effect on the loss."""
    section = _section(values)
    loss = section.loss_type
    # losses that read each field
    read = {
        "beta": ("sigmoid", "ipo", "hinge", "orpo", "kto"),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "margin": ("bradley_terry",),
        "center_rewards_coefficient": ("bradley_terry",),
        "label_smoothing": ("sigmoid",),
        "length_normalized": ("sigmoid", "ipo", "hinge"),
        "reference": ("sigmoid", "ipo", "hinge", "kto"),
    }
    for name, losses in read.items():
        value = getattr(section, name)
        if value != getattr(PLAIN_PREFERENCE, name) and loss not in losses:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Fault(
                fact=f"preference.{name}={shown} with preference.loss_type={loss}",
                rule=f"it belongs to {', '.join(losses)}, and has no effect here",
                remedy=f"leave preference.{name} out, or set preference.loss_type={losses[0]}",
            )


@reads("preference.loss_type, data.packing seq_len document_multiple, parallel.dynamic_cp")
def row_faults(
    loss: str,
    packing: str,
    seq_len: int,
    multiple: int,
    is_dynamic: bool,  # a rule's values
) -> Iterator[Fault]:
    """Check that pairs fit into rows, and stay whole."""
    name = f"preference.loss_type={loss}"
    if loss == "none":
        return
    yield from broken_rows(
        [
            (
                packing == "none",
                f"{name} with data.packing=none",
                "a row of pairs holds whole answers that do not see each other",
                "set data.packing=best_fit; with data.packing_window=1 each row is one pair",
            ),
            (
                seq_len // 2 < multiple,
                f"{name} with data.seq_len={seq_len} and data.document_multiple={multiple}",
                f"a row holds two answers of {multiple} tokens at least",
                f"set data.seq_len={2 * multiple}, or a smaller data.document_multiple",
            ),
            (
                is_dynamic,
                f"{name} with parallel.dynamic_cp=true",
                "dynamic context parallelism moves each document by itself, and a pair has two",
                "set parallel.dynamic_cp=false",
            ),
        ]
    )


@reads("preference.loss_type, model.loss label_smoothing z_loss num_nextn_predict_layers moe")
def token_loss_faults(  # a rule's values
    loss: str, token_loss: str, smoothing: float, z_loss: float, depth: int, moe: MoeSection
) -> Iterator[Fault]:
    """Check that the loss of pairs has no terms of the loss of tokens."""
    if loss == "none":
        return
    if token_loss != "cross_entropy":
        yield Fault(
            fact=f"model.loss={token_loss} with preference.loss_type={loss}",
            rule="the loss of a pair is made of the log-probabilities of its answers",
            remedy="set model.loss=cross_entropy, or preference.loss_type=none",
        )
    # each term of the loss of tokens that may be on, with its field
    balance = moe.router_aux_loss_coef if moe.load_balancing_type != "none" else 0.0
    terms = {
        "model.label_smoothing": smoothing,
        "model.z_loss": z_loss,
        "model.num_nextn_predict_layers": depth,
        "model.moe.router_aux_loss_coef": balance if moe.num_experts else 0.0,
        "model.moe.router_z_loss_coef": moe.router_z_loss_coef if moe.num_experts else 0.0,
    }
    yield from broken_rows(
        [
            (
                bool(value),
                f"{field}={value:g} with preference.loss_type={loss}",
                "it is a term of the loss of tokens, which is divided by tokens and not by pairs",
                f"set {field}=0",
            )
            for field, value in terms.items()
        ]
    )


@reads(
    f"preference.{PREFERENCE_FIELDS}, model.lora train, checkpoint.init_adapter, data.transforms"
)
def reference_faults(*values: Any) -> Iterator[Fault]:
    """Check that the reference is there, is that of the job's rows, and that the run begins with it."""
    *own, lora, train, init_adapter, transforms = values
    section = _section(own)
    if section.needs_reference and section.reference == "stored" and transforms:
        yield Fault(
            fact=f"data.transforms=[{', '.join(transforms)}] with preference.reference=stored",
            rule="the stored log-probabilities are those of answers that no transform has changed",
            remedy="leave data.transforms out, or set preference.reference=base for adapters",
        )
    if not section.needs_reference or section.reference != "base":
        return
    name = f"preference.reference=base with preference.loss_type={section.loss_type}"
    if not lora.r:
        yield Fault(
            fact=f"{name} and model.lora.r=0",
            rule="the reference is the frozen weights under the adapters, and here all weights are trained",
            remedy="set model.lora.r=16, or preference.reference=stored after `raymega data reference`",
        )
    if train:
        yield Fault(
            fact=f"{name} and model.train=[{', '.join(train)}]",
            rule="weights that are trained beside the adapters would change the reference too",
            remedy="leave model.train out, or set preference.reference=stored",
        )
    if init_adapter != "none":
        yield Fault(
            fact=f"{name} and checkpoint.init_adapter={init_adapter!r}",
            rule="the reference has no adapters, so the run would not begin with it",
            remedy="merge them first (`raymega checkpoint merge`), or set preference.reference=stored",
        )
