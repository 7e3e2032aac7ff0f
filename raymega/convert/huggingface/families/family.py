"""A model family of transformers beside those of Llama's form: settings and names that differ.

One file of this folder holds one or a few families; `table.py` lists them. The parts that their layers
are built of are in `plan/layers/family_parts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import Architecture, Config, Renames

Names = Mapping[str, tuple[str, ...]]
"""Map from a module of theirs to the modules of ours whose tensors it stacks."""

KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
"""Values of ``layer_types`` there, and ours."""
EVERY_ROPE = ("default", "linear", "llama3", "yarn")


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedExperts:
    """Tensors there that hold all experts: [E, in, out], and biases [E, out].

    Attributes:
        module: Begin of their names inside a block.
        is_interleaved: Whether outputs of gate and up alternate; else up follows gate.
    """

    module: str
    is_interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFamily:
    """Differences of a family's config.json and tensors from those of Llama.

    Attributes:
        architecture: Class, family, defaults, and settings with one possible value.
        modules: Names of a block's modules that differ.
        outer: Names of the modules outside of blocks; empty for Llama's.
        prefix: Begin of the names of all blocks.
        head_wise: Modules of theirs whose rows alternate between ours head by head.
        key_head_wise: The same by key heads of linear attention.
        tensors: Names of a block's tensors whose last parts differ too.
        experts: Layout of their experts' tensors, if each holds those of all experts.
        expert_module: Name of the module of router and experts inside a block.
        renames: Settings that Llama has under another name.
        values: Function from config.json to further fields of the model section, nested ones included.
        config: Function from the model section to further settings of config.json.
        layer_types: Function from config.json to the kinds of layers where it does not list them; None
            for a family without windows.
        further_kinds: Kinds of layers in config.json that ``values`` reads.
        writes_layer_types: Whether its config.json lists the kinds of layers.
        has_partial_rotary: Whether it reads partial_rotary_factor.
        has_rope_by_type: Whether its rope_parameters are one table a kind of layer.
        default_rope: RoPE's settings where config.json has none.
        ropes: Values of rope_type that it knows.
        blocks: Function from model and layer to the names of a block's modules, theirs and ours in full, where they
            are not alike in all blocks; None takes ``prefix`` and ``modules``.
        tokens: Ids of special tokens that its config.json has where the import's had none.
        owns_settings: Whether ``values`` and ``config`` are of all settings, and none is as Llama's.
    """

    architecture: Architecture
    modules: Names = field(default_factory=dict)
    outer: Names = field(default_factory=dict)
    prefix: str = "model.layers"
    head_wise: tuple[str, ...] = ()
    key_head_wise: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    experts: StackedExperts | None = None
    expert_module: str = "mlp"
    renames: Renames = field(default_factory=dict)
    values: Callable[[Config], dict[str, Any]] = _nothing
    config: Callable[[ModelSection], dict[str, Any]] = _nothing
    layer_types: Callable[[Config], Sequence[str]] | None = None
    further_kinds: tuple[str, ...] = ()
    writes_layer_types: bool = True
    has_partial_rotary: bool = False
    has_rope_by_type: bool = False
    default_rope: Config = field(default_factory=dict)
    ropes: tuple[str, ...] = EVERY_ROPE
    owns_settings: bool = False
    blocks: Callable[[ModelSection, int], Names] | None = None
    tokens: Config = field(default_factory=lambda: {"pad_token_id": None})

    def renamed(self, config: Config) -> dict[str, Any]:
        """Return the settings under Llama's names."""
        return {self.renames.get(name, name): value for name, value in config.items()}

    def renamed_back(self, config: Config) -> dict[str, Any]:
        """Return the settings under the family's own names."""
        own = {llama: name for name, llama in self.renames.items()}
        return {own.get(name, name): value for name, value in config.items()}

    def windows(self, config: Config) -> dict[str, Any]:
        """Return the fields of ``model.attention`` with the kinds of layers and their window."""
        window = config.get("sliding_window")
        if self.layer_types is None or not window:
            return {}
        # kinds of all layers: as listed, or the family's pattern repeated
        there = config.get("layer_types") or self.layer_types(config)
        count = config["num_hidden_layers"]
        kinds = [KINDS[there[layer % len(there)]] for layer in range(count)]
        if "sliding" not in kinds:
            return {}
        return {"layer_types": shortest_period(kinds), "sliding_window": window}

    def window_config(self, model: ModelSection) -> dict[str, Any]:
        """Return the settings with the kinds of layers and their window."""
        if self.layer_types is None:
            return {}
        # our pattern, repeated over all layers and written in their words
        theirs = {ours: kind for kind, ours in KINDS.items()}
        kinds = model.attention.layer_types
        count = range(model.num_layers)
        listed = [theirs.get(kinds[i % len(kinds)], "full_attention") for i in count]
        window = {"sliding_window": model.attention.sliding_window or None}
        return window | ({"layer_types": listed} if self.writes_layer_types else {})


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest begin of ``kinds`` that gives the whole when it is repeated."""
    for size in range(1, len(kinds)):
        if all(kind == kinds[at % size] for at, kind in enumerate(kinds)):
            return tuple(kinds[:size])
    return tuple(kinds)


def scale_of(factor: float, width: int) -> float:
    """Return ``model.attention.score_scale`` for a factor on scores; 0 where it is 1 / sqrt(width)."""
    is_plain = width > 0 and factor == width**-0.5
    return 0.0 if is_plain else factor
