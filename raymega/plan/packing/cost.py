"""Estimate the seconds that a pack of documents costs the ranks that hold it, by formula.

Linear layers cost by the token, attention by the pair of tokens inside a document, the ring of keys
and values by the bytes that it sends. ``raymega.plan.packing.dynamic_cp`` compares schedules by
these costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raymega.config.schema import ModelSection
from raymega.plan.flops import FORWARD_AND_BACKWARD, head_weights
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.tensor_table import layer_tensors

KV_BACKWARD = 3
"""Bytes of both passes over those of the forward. A backward sends keys, values and the gradients
of both around: twice the forward's bytes."""
KERNELS_OF_A_LAYER = 60
"""Kernel launches of a layer's forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCost:
    """Seconds of forward and backward of one micro-batch, on one rank and one pipeline stage.

    Attributes:
        token_s: Seconds of a token in all linear layers.
        pair_s: Seconds of a query with a key that it sees, in attention.
        near_s: Seconds to send a token's keys and values (and their gradients) to a rank of the
            node.
        far_s: Seconds to send the same to a rank of another node.
        hop_s: Seconds until the first byte of such a message arrives, all layers together.
        start_s: Seconds of a micro-batch, however small.
        ranks_per_node: Number of neighbours that messages reach at ``near_s``.
    """

    token_s: float
    pair_s: float
    near_s: float = 0.0
    far_s: float = 0.0
    hop_s: float = 0.0
    start_s: float = 0.0
    ranks_per_node: int = 8

    def seconds(self, *, tokens: int, pairs: int, size: int) -> float:
        """Return the seconds of a pack that ``size`` ranks hold together.

        Transfers overlap attention's blocks, and the longer of both counts. The first block
        overlaps none, because its keys are on the rank.

        Args:
            tokens: Number of tokens on each rank, padding included.
            pairs: Number of query-key pairs of all documents; the zigzag gives each rank an equal
                share.
            size: Number of ranks.
        """
        # ring: size blocks of size / size^2 of the pairs each, the first without a transfer
        block = self.pair_s * pairs / size / size
        link = self.near_s if size <= self.ranks_per_node else self.far_s
        hop = self.hop_s + link * tokens if size > 1 else 0.0
        attention = block + (size - 1) * max(block, hop)
        return self.start_s + self.token_s * tokens + attention


def pairs_of(length: int) -> int:
    """Return the number of queries with keys that they see, in one causal document."""
    return length * (length + 1) // 2


def pairs_in(lengths: Iterable[int]) -> int:
    """Return the number of such pairs in several documents that do not see each other."""
    return sum(map(pairs_of, lengths))


def make_pack_cost(
    model: ModelSection,
    device: Accelerator,
    *,
    layers: int,
    tp: int = 1,
) -> PackCost:
    """Return the costs of ``layers`` layers of ``model`` and its head in 16 bits on ``device``.

    Args:
        model: Section ``model`` of the job.
        device: Accelerator of every rank.
        layers: Number of layers in the pipeline stage.
        tp: Number of ranks that share each layer's work; what they send each other is not counted.
    """
    fitted = device.fitted
    weights = sum(t.num_elements for t in layer_tensors(model, 0) if len(t.shape) == 2)
    head = head_weights(model)
    # 2 FLOPs for each weight and token, in three products
    token_flops = FORWARD_AND_BACKWARD * 2 * (layers * weights + head) / tp
    # Two products forward; backward recomputes the scores, so five: 7 / 2 of forward.
    pair_flops = 3.5 * 2 * 2 * model.num_heads * model.head_width * layers / tp
    # keys and values, 2 bytes a number
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
