"""Check the rules of heads without a vocabulary, and of the reward models among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymega.config.encoder import EncoderSection, MaskingSection
from raymega.config.heads.section import HeadSection
from raymega.config.lora import LoraSection
from raymega.config.moe import MoeSection
from raymega.config.schema import EvalTask
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.validation.rule import FaultRow, broken_rows, reads

PLAIN = HeadSection()
READ_BY = {
    "num_labels": ("sequence_classification", "token_classification"),
    "num_choices": ("multiple_choice",),
    "pooling": (
        "sequence_classification",
        "multiple_choice",
        "regression",
        "reward",
        "embedding",
        "none",
    ),
    "temperature": ("embedding",),
    "normalize": ("embedding",),
}
"""Kinds of heads that read each field."""


@reads("model.head")
def idle_head_faults(head: HeadSection) -> Iterator[Fault]:
    """Check that each field of the section has an effect."""
    for field, kinds in READ_BY.items():
        value = getattr(head, field)
        if value != getattr(PLAIN, field) and head.kind not in kinds:
            yield Fault(
                fact=f"model.head.{field}={value} with model.head.kind={head.kind}",
                rule=f"it belongs to {', '.join(kinds)}, and has no effect here",
                remedy=f"leave model.head.{field} out, or set model.head.kind={kinds[0]}",
            )


@reads("model.head hidden_dropout attention_dropout neftune_noise_alpha lora moe")
def embedding_faults(  # a rule's values
    head: HeadSection,
    hidden: float,
    attention: float,
    noise: float,
    lora: LoraSection,
    moe: MoeSection,
) -> Iterator[Fault]:
    """Check that a batch's embeddings, computed twice in a step, are the same both times."""
    drawn = {
        "hidden_dropout": hidden, "attention_dropout": attention, "neftune_noise_alpha": noise,
        "lora.lora_dropout": lora.lora_dropout, "moe.router_jitter_noise": moe.router_jitter_noise,
    }  # fmt: skip
    unlike = {name: (f"{value:g}", "0") for name, value in drawn.items() if value}
    # the first pass is an evaluation's, in which each token chooses for itself
    if moe.load_balancing_type == "sinkhorn":
        unlike["moe.load_balancing_type"] = ("sinkhorn", "none")
    for field, (value, other) in unlike.items():
        if head.kind == "embedding":
            yield Fault(
                fact=f"model.{field}={value} with model.head.kind=embedding",
                rule="a step computes its embeddings once for the loss of the whole batch, and again for the gradients",
                remedy=f"set model.{field}={other}",
            )


@reads("model.head, data.global_batch_size packing_window")
def lone_pair_faults(head: HeadSection, batch: int, window: int) -> Iterator[Fault]:
    """Check that a step's pairs of texts have others beside them, without which every loss is 0."""
    if head.kind == "embedding" and batch == window == 1:
        yield Fault(
            fact="model.head.kind=embedding with data.global_batch_size=1 and data.packing_window=1",
            rule="the other pairs of a step are a pair's negatives, and here it has none",
            remedy="set data.global_batch_size=64",
        )


@reads("model.head family, run.steps")
def headless_faults(head: HeadSection, family: str, steps: int) -> Iterator[Fault]:
    """Check that a job that trains has a head: models without one exist as imports alone."""
    del family, steps  # a model section by itself has no steps, and may be without a head
    if head.kind == "none":
        yield Fault(
            fact="model.head.kind=none",
            rule="the states of the last block have no loss",
            remedy="set model.head.kind=sequence_classification and checkpoint.reinit=[head.score.*]",
        )


@reads(
    "model.head family max_positions, data.packing seq_len document_multiple loss_on, parallel.dynamic_cp"
)
def head_row_faults(
    head: HeadSection,
    family: str,
    max_positions: int,
    packing: str,
    seq_len: int,
    multiple: int,
    loss_on: str,
    is_dynamic: bool,  # a rule's values
) -> Iterator[Fault]:
    """Check that labelled documents fit into rows, and stay whole."""
    if not head.is_on or head.kind == "none":
        return
    name, first = f"model.head.kind={head.kind}", family_parts(family).first_position
    size = {"multiple_choice": head.num_choices, "embedding": 2}.get(head.kind, 1)
    yield from broken_rows(
        [
            (
                packing == "none",
                f"{name} with data.packing=none",
                "a row holds whole documents that do not see each other",
                "set data.packing=best_fit; with data.packing_window=1 each row is one document",
            ),
            (
                seq_len // size < multiple,
                f"{name} with data.seq_len={seq_len} and data.document_multiple={multiple}",
                f"a row holds {size} documents that belong together, of {multiple} tokens at least each",
                f"set data.seq_len={size * multiple}, or a smaller data.document_multiple",
            ),
            (
                is_dynamic,
                f"{name} with parallel.dynamic_cp=true",
                "dynamic context parallelism moves documents, and scores have places in them",
                "set parallel.dynamic_cp=false",
            ),
            (
                loss_on != "auto" and head.kind != "reward",
                f"data.loss_on={loss_on} with {name}",
                "labels are the dataset's, and no tokens count",
                "leave data.loss_on out",
            ),
            (
                seq_len + first > max_positions >= seq_len and first > 0,
                f"data.seq_len={seq_len} with model.max_positions={max_positions}",
                f"positions of {family} begin at row {first} of their table",
                f"set data.seq_len={max_positions - first} or less",
            ),
        ]
    )


@reads(
    "model.head loss label_smoothing z_loss num_nextn_predict_layers mup_base_width moe encoder, data.masking, "
    "run.eval_tasks samples_every"
)
def head_part_faults(  # one an option
    head: HeadSection,
    token_loss: str,
    smoothing: float,
    z_loss: float,
    depth: int,
    base_width: int,
    moe: MoeSection,
    encoder: EncoderSection,
    masking: MaskingSection,
    tasks: Sequence[EvalTask],
    samples_every: int,
) -> Iterator[Fault]:
    """Check that the model has no part, and the run no option, of a language model's head."""
    if not head.is_on or head.kind == "none":
        return
    end = f" with model.head.kind={head.kind}"
    balance = moe.router_aux_loss_coef if moe.load_balancing_type != "none" else 0.0
    # each term of the loss of tokens that may be on, with its field
    terms = {
        "model.label_smoothing": smoothing,
        "model.z_loss": z_loss,
        "model.num_nextn_predict_layers": depth,
        "model.mup_base_width": base_width,
        "model.moe.router_aux_loss_coef": balance if moe.num_experts else 0.0,
        "model.moe.router_z_loss_coef": moe.router_z_loss_coef if moe.num_experts else 0.0,
        "run.samples_every": samples_every,
    }
    rows: list[FaultRow] = [
        (
            bool(value),
            f"{field}={value:g}{end}",
            "it belongs to a language model's head, its loss or its scale",
            f"set {field}=0",
        )
        for field, value in terms.items()
    ]
    rows += [
        (
            token_loss != "cross_entropy",
            f"model.loss={token_loss}{end}",
            "it is a loss of tokens of the vocabulary",
            "set model.loss=cross_entropy",
        ),
        (
            bool(tasks),
            f"run.eval_tasks has {len(tasks)} entries{end}",
            "tasks ask for probabilities of tokens",
            "leave run.eval_tasks out: run.eval_samples measures loss and accuracy",
        ),
        (
            encoder.has_pairs,
            f"model.encoder.sentence_loss={encoder.sentence_loss}{end}",
            "pairs of segments are a loss of pre-training",
            "leave model.encoder.sentence_loss out",
        ),
        (
            masking != MaskingSection(),
            f"data.masking is set{end}",
            "no token is masked: documents are read as they were prepared",
            "leave data.masking out",
        ),
    ]
    yield from broken_rows(rows)


@reads("model.head, preference.loss_type")
def reward_faults(head: HeadSection, loss: str) -> Iterator[Fault]:
    """Check that a head for rewards has their loss, and the other way round."""
    is_loss, is_head = loss == "bradley_terry", head.kind == "reward"
    if is_head and not is_loss:
        yield Fault(
            fact=f"model.head.kind=reward with preference.loss_type={loss}",
            rule="a reward model learns from pairs of a chosen and a rejected answer",
            remedy="set preference.loss_type=bradley_terry",
        )
    elif is_loss and not is_head:
        yield Fault(
            fact=f"preference.loss_type=bradley_terry with model.head.kind={head.kind}",
            rule="it compares the scores of two answers",
            remedy="set model.head.kind=reward",
        )
    elif head.is_on and not is_head and loss != "none":
        yield Fault(
            fact=f"preference.loss_type={loss} with model.head.kind={head.kind}",
            rule="it compares log-probabilities, and this head has no vocabulary",
            remedy="set preference.loss_type=none, or leave model.head out",
        )
