"""What a pack of documents costs the ranks that hold it together: seconds, by formula.

Linear layers cost by the token, attention by the pair of tokens inside a document, the ring of keys
and values by what it carries. It knows no schedule and takes no decision; dynamic_cp compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raymega.config.schema import ModelSection
from raymega.plan.flops import FORWARD_AND_BACKWARD
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.tensor_table import layer_tensors

KV_BACKWARD = 3
"""Backward carries keys, values and the gradients of both round: twice forward's bytes, so 3 in all."""
KERNELS_OF_A_LAYER = 60
"""Launches of its forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCost:
    """Seconds of forward and backward of one micro-batch, on one rank and one pipeline stage.

    Attributes:
        token_s: Of a token in all linear layers.
        pair_s: Of a query with a key that it sees, in attention.
        near_s: To send a token's keys and values (and their gradients) on to a rank of the node.
        far_s: The same to a rank of another node.
        hop_s: Before the first byte of such a message arrives, all layers together.
        start_s: Of a micro-batch, however small.
        ranks_per_node: Neighbours that messages reach at ``near_s``.
    """

    token_s: float
    pair_s: float
    near_s: float = 0.0
    far_s: float = 0.0
    hop_s: float = 0.0
    start_s: float = 0.0
    ranks_per_node: int = 8

    def seconds(self, *, tokens: int, pairs: int, size: int) -> float:
        """Of a pack that ``size`` ranks hold together.

        Transfers go on behind attention's blocks; what is longer counts, but for the first block,
        whose keys are there already.

        Args:
            tokens: On each rank, padding included.
            pairs: Of query and key, of all documents; the zigzag gives each rank an equal share.
            size: Ranks.
        """
        block = self.pair_s * pairs / size / size
        link = self.near_s if size <= self.ranks_per_node else self.far_s
        hop = self.hop_s + link * tokens if size > 1 else 0.0
        attention = block + (size - 1) * max(block, hop)
        return self.start_s + self.token_s * tokens + attention


def pairs_of(length: int) -> int:
    """Queries with the keys that they see, in one causal document."""
    return length * (length + 1) // 2


def pairs_in(lengths: Iterable[int]) -> int:
    """The same, of several documents that do not see each other."""
    return sum(map(pairs_of, lengths))


def make_pack_cost(
    model: ModelSection,
    device: Accelerator,
    *,
    layers: int,
    tp: int = 1,
) -> PackCost:
    """The costs of ``layers`` layers of ``model`` and its head in 16 bits on ``device``.

    Args:
        model: Whose layers.
        device: What the ranks are.
        layers: Of the pipeline stage.
        tp: Ranks that share each layer's work; what they send each other is not counted.
    """
    fitted = device.fitted
    weights = sum(t.num_elements for t in layer_tensors(model, 0) if len(t.shape) == 2)
    head = model.vocab_size * model.hidden_size
    token_flops = FORWARD_AND_BACKWARD * 2 * (layers * weights + head) / tp
    # Two products forward; backward makes the scores again, so five: 7 / 2 of forward.
    pair_flops = 3.5 * 2 * 2 * model.num_heads * model.head_width * layers / tp
    kv_bytes = 2 * 2 * max(1, model.kv_heads // tp) * model.head_width
    return PackCost(
        token_s=token_flops / (device.peak_16_bit_flops * fitted.matmul_share),
        pair_s=pair_flops / device.attention_flops,
        near_s=KV_BACKWARD * kv_bytes * layers / device.reached_link_bytes_per_s,
        far_s=KV_BACKWARD * kv_bytes * layers / device.reached_network_bytes_per_s,
        hop_s=2 * layers * fitted.network_latency_s,
        start_s=layers * KERNELS_OF_A_LAYER * fitted.launch_s,
        ranks_per_node=device.devices_per_node // tp,
    )
