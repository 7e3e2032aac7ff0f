"""Check the rules of distillation: a loss of next tokens, and a teacher with the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raymega.config.heads.section import HeadSection
from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.validation.rule import broken_rows, reads

SEEN = (
    "image_size", "min_pixels", "max_pixels", "patch_size", "spatial_merge_size", "image_token_id", "image_mean", "image_std", "mrope_edge",
    "tensor_parallel",
)  # fmt: skip
"""Fields of a vision section that decide an image's pixels, the ranks that read it, its tokens and their positions."""


@reads(
    "distillation.loss_type, model.family head num_nextn_predict_layers loss, preference.loss_type"
)
def objective_faults(  # a rule's values
    loss: str, family: str, head: HeadSection, depth: int, token_loss: str, pair_loss: str
) -> Iterator[Fault]:
    """Check that the loss is one of next tokens, of which a teacher has a distribution."""
    if loss == "none":
        return
    end, off = f" with distillation.loss_type={loss}", "or distillation.loss_type=none"
    parts = family_parts(family)
    yield from broken_rows(
        [
            (
                not parts.is_causal or parts.is_encoder_decoder,
                f"model.family={family}{end}",
                "the divergence is one of next tokens, of a decoder alone",
                "set distillation.loss_type=none",
            ),
            (
                head.is_on,
                f"model.head.kind={head.kind}{end}",
                "the divergence is over a vocabulary, and this head has none",
                f"leave model.head out, {off}",
            ),
            (
                depth > 0,
                f"model.num_nextn_predict_layers={depth}{end}",
                "a teacher has a distribution of the next token only",
                f"set model.num_nextn_predict_layers=0, {off}",
            ),
            (
                token_loss != "cross_entropy",
                f"model.loss={token_loss}{end}",
                "the divergence stands beside cross entropy",
                f"set model.loss=cross_entropy, {off}",
            ),
            (
                pair_loss != "none",
                f"preference.loss_type={pair_loss}{end}",
                "the loss is either one of pairs or one of tokens",
                f"set preference.loss_type=none, {off}",
            ),
        ]
    )


@reads("distillation.loss_type teacher_model, model.vocab_size make_vocab_size_divisible_by")
def vocabulary_faults(
    loss: str, teacher: ModelSection | str, vocab_size: int, multiple: int
) -> Iterator[Fault]:
    """Check that a teacher has a use, and the model's tokens in a table that is cut alike."""
    if not isinstance(teacher, ModelSection):
        return
    if loss == "none":
        yield Fault(
            fact="distillation.teacher_model is set, and distillation.loss_type=none",
            rule="without a divergence there is no teacher",
            remedy="set distillation.loss_type=forward_kl, or leave distillation.teacher_model out",
        )
        return
    # tp cuts the padded table
    rows = -(-vocab_size // multiple) * multiple
    if teacher.vocab_size != vocab_size:
        yield Fault(
            fact=f"distillation.teacher_model.vocab_size={teacher.vocab_size} and model.vocab_size={vocab_size}",
            rule="the divergence compares the probabilities of the same tokens",
            remedy="take a teacher with the model's tokenizer",
        )
    elif teacher.table_rows != rows:
        yield Fault(
            fact=f"distillation.teacher_model has {teacher.table_rows} rows of tokens with padding, the model {rows}",
            rule="a rank compares the logits of the same tokens, so both tables are cut alike",
            remedy=f"import the teacher with --make-vocab-size-divisible-by {multiple}, and set "
            f"distillation.teacher_model.make_vocab_size_divisible_by={multiple}",
        )


@reads("distillation.loss_type teacher_model, model.vision")
def vision_faults(loss: str, teacher: ModelSection | str, vision: VisionSection) -> Iterator[Fault]:
    """Check that a teacher sees the images that the model sees, as they were prepared for it."""
    if loss == "none" or not isinstance(teacher, ModelSection):
        return
    seen: tuple[str, ...] = SEEN if vision.is_on and teacher.vision.is_on else ()
    if vision.is_on is not teacher.vision.is_on:
        seen = ("kind",)
    for name in seen:
        then, now = getattr(teacher.vision, name), getattr(vision, name)
        if then != now:
            yield Fault(
                fact=f"distillation.teacher_model.vision has {name}={then}, and model.vision {now}",
                rule="images become tokens and pixels as model.vision says, and the teacher reads the same ones",
                remedy="take a teacher that reads images as the model does",
            )


@reads(
    "distillation.loss_type teacher top_k, model.vocab_size, data.transforms, parallel.dynamic_cp"
)
def stored_faults(*values: Any) -> Iterator[Fault]:
    """Check that stored logits can be used by the loss, and are those of the job's rows."""
    loss, teacher, top_k, vocab_size, transforms, is_dynamic = values
    if loss == "none" or teacher != "stored":
        return
    name = "distillation.teacher=stored"
    yield from broken_rows(
        [
            (
                loss == "reverse_kl",
                f"distillation.loss_type=reverse_kl with {name}",
                "KL(model || teacher) needs the teacher's probability of every token, and the largest are stored",
                "set distillation.loss_type=forward_kl, or distillation.teacher=live",
            ),
            (
                top_k > vocab_size,
                f"distillation.top_k={top_k} and model.vocab_size={vocab_size}",
                f"a token has {vocab_size} logits",
                f"set distillation.top_k={vocab_size} or less",
            ),
            (
                bool(transforms),
                f"data.transforms=[{', '.join(transforms)}] with {name}",
                "the stored logits are those of rows that no transform has changed",
                "leave data.transforms out, or set distillation.teacher=live",
            ),
            (
                is_dynamic,
                f"parallel.dynamic_cp=true with {name}",
                "dynamic context parallelism moves each document by itself, without what is stored beside it",
                "set parallel.dynamic_cp=false, or distillation.teacher=live",
            ),
        ]
    )
