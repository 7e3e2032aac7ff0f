"""The job file's model.layer_sizes section: sizes that differ by layer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from raymega.config.attention import as_tuple
from raymega.config.fields import Positive, Section

Sizes = Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)]


class LayerSizesSection(Section):
    """Sizes of each layer where they differ, repeated from layer 0 to the last; an empty list is the model's own.

    The model's field of the same name then is the largest of the list.
    """

    ffn_hidden_size: Sizes = ()
    """F of each layer's dense feed-forward layer."""
    num_heads: Sizes = ()
    """H of each layer; model.head_dim is then a number."""
    num_kv_heads: Sizes = ()
    """G of each layer."""

    @property
    def is_on(self) -> bool:
        """True where some size differs by layer."""
        return bool(self.ffn_hidden_size or self.num_heads or self.num_kv_heads)

    def of(self, layer: int) -> dict[str, int]:
        """Return the sizes of block ``layer`` by field of the model section; none that are the model's own."""
        return {name: sizes[layer % len(sizes)] for name, sizes in self if sizes}
