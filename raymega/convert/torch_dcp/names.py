"""Names of our tensors in a torch checkpoint, in both directions, and differences in row order.

Weights keep their names, below ``model.`` or at the top; optimizer state is named
``optimizer.state.<weight>.<slot>``. Other names need a rule OLD=NEW.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.config.attention import AttentionSection, MultipliersSection
from raymega.config.schema import ModelSection
from raymega.convert.number_formats import Array
from raymega.errors import Fault
from raymega.plan.rename_rules import Rename, make_renames, renamed
from raymega.plan.tensor_table import model_tensors

SLOTS = {
    "exp_avg": "adam.exp_avg",
    "exp_avg_sq": "adam.exp_avg_sq",
    "momentum_buffer": "sgd.momentum",
    "lion_exp_avg": "lion.exp_avg",
    "muon_momentum": "muon.momentum",
}
"""Kind of our saved tensors for each slot of torch's optimizers. torch has no Lion, and scales Muon's
updates otherwise, so these two slots have names of our own."""
STEP = "step"
# "app." is the key under which PyTorch's tutorial on distributed checkpoints saves its state.
_KIND_OF = {kind: slot for slot, kind in SLOTS.items()}
_STATE = re.compile(r"(?:app\.)?optim(?:izer)?\.state\.(?P<weight>.+)\.(?P<slot>\w+)")
_OPTIMIZER = re.compile(r"(?:app\.)?optim(?:izer)?\..*")
_WEIGHT = re.compile(r"(?:app\.)?(?:model\.)?(?P<weight>.+)")
_TITAN_RULES = (
    "tok_embeddings=embedding.tokens", "norm=final_norm", "output=head",
    "layers.*.attention.wq=layers.*.attention.q", "layers.*.attention.wk=layers.*.attention.k",
    "layers.*.attention.wv=layers.*.attention.v", "layers.*.attention.wo=layers.*.attention.out",
    "layers.*.feed_forward.w1=layers.*.mlp.gate", "layers.*.feed_forward.w3=layers.*.mlp.up",
    "layers.*.feed_forward.w2=layers.*.mlp.down", "layers.*.ffn_norm=layers.*.mlp_norm",
)  # fmt: skip
_ROTATED = re.compile(r"layers\.\d+\.attention\.(q|k)\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """Conventions of a code base that writes torch checkpoints.

    Attributes:
        renames: Rules from its names to ours.
        path: Keys of the nested dict above the weights.
        has_interleaved_rope: Whether RoPE rotates features 2i and 2i + 1 of a head instead of i and
            i + width / 2, so that rows of q and k have another order.
        has_padding: Whether token tables have our padded rows.
        families: Values of ``model.family`` for which the conventions are known; all when empty.
    """

    renames: tuple[Rename, ...] = ()
    path: tuple[str, ...] = ("model",)
    has_interleaved_rope: bool = False
    has_padding: bool = True
    families: tuple[str, ...] = ()


DIALECTS = {
    "raymega": Dialect(),
    "torchtitan": Dialect(
        renames=make_renames(_TITAN_RULES), path=(), has_interleaved_rope=True, has_padding=False,
        families=("llama",),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """Meaning of an entry of a torch checkpoint for a run.

    Attributes:
        kind: Kind of our saved name; ``step`` for an optimizer's count of updates; empty for an entry
            that a run does not need, such as the optimizer's settings.
        weight: Name of the weight in our model.
    """

    kind: str
    weight: str

    @property
    def saved_name(self) -> str:
        """Name in a native checkpoint."""
        return f"{self.kind}/{self.weight}"


def meaning_of(name: str, renames: Sequence[Rename]) -> Meaning:
    """Return the meaning of the entry ``name``, renamed by ``renames``."""
    # Optimizer state first: the pattern of weights fits every name.
    state = _STATE.fullmatch(name)
    if state:
        slot = state["slot"]
        kind = SLOTS.get(slot, STEP if slot == STEP else "")
        return Meaning(kind=kind, weight=renamed(state["weight"], renames))
    match = _WEIGHT.fullmatch(name)
    if _OPTIMIZER.fullmatch(name) or match is None:
        return Meaning(kind="", weight=name)
    return Meaning(kind=WEIGHTS, weight=renamed(match["weight"], renames))


def path_of(saved: str, dialect: Dialect) -> tuple[str, ...]:
    """Return the keys of the nested dict under which torch finds our tensor ``saved``."""
    kind, _, weight = saved.partition("/")
    theirs = renamed(weight, [rename.inverse() for rename in dialect.renames])
    if kind == WEIGHTS:
        return (*dialect.path, theirs)
    return ("optimizer", "state", theirs, _KIND_OF[kind])


def state_faults(kinds: Iterable[str]) -> Iterator[Fault]:
    """Return the fault of state that torch has no slot for, such as 8-bit codes and their scales."""
    unknown = sorted(set(kinds) - {WEIGHTS, *_KIND_OF})
    if unknown:
        yield Fault(
            fact=f"the checkpoint holds {', '.join(unknown)}",
            rule=f"known to torch are {', '.join(_KIND_OF)}",
            remedy="continue the run for a step from these weights with optimizer.state_dtype=master, by "
            "checkpoint.init_from, or export to Hugging Face, which takes weights alone",
        )


def reorder_rope_rows(values: Array, head_width: int, *, to_ours: bool) -> Array:
    """Return the rows of q or k, [heads * head_width, ...], in the order of the other RoPE."""
    # By their numbers, our order is: the even features of a head first, then the odd ones.
    pairs = (
        np.arange(head_width).reshape(2, -1)
        if not to_ours
        else np.arange(head_width).reshape(-1, 2)
    )
    order = pairs.T.reshape(-1)
    heads = values.reshape(-1, head_width, *values.shape[1:])
    return heads[:, order].reshape(values.shape)


def is_reordered(saved: str, dialect: Dialect) -> bool:
    """Return whether the rows of a tensor have another order in ``dialect``: the weights of q and k."""
    # families admits only llama, which has neither biases nor norms of q and k.
    return dialect.has_interleaved_rope and _ROTATED.fullmatch(saved.partition("/")[2]) is not None


def padded_rows(model: ModelSection, dialect: Dialect) -> dict[str, int]:
    """Return the number of padded rows, by weight, that our tensors have and the dialect's do not."""
    if dialect.has_padding:
        return {}
    return {
        tensor.name: tensor.padded_rows for tensor in model_tensors(model) if tensor.padded_rows
    }


def dialect_faults(names: str, model: ModelSection | None) -> Iterator[Fault]:
    """Return the fault of an unknown dialect, or of one that is not known for this model."""
    if names not in DIALECTS:
        rule = f"known are {', '.join(DIALECTS)}"
        yield Fault(fact=f"--names {names!r}", rule=rule, remedy="use one of them, and --rename")
        return
    families = DIALECTS[names].families
    if not families:
        return
    if model is not None and model.family in families:
        plain = AttentionSection(), MultipliersSection()
        if (model.attention, model.multipliers) != plain:
            yield Fault(
                fact=f"--names {names} with model.attention or model.multipliers",
                rule="the model there has one kind of layer, plain scores and no such factors",
                remedy="use raymega's own names",
            )
        return
    yield Fault(
        fact=f"--names {names} with {f'family {model.family}' if model else 'no model section'}",
        rule=f"names, order of rows and padding there are known for {', '.join(families)}",
        remedy="give the model by --job JOB.yaml" if model is None else "use --rename",
    )
