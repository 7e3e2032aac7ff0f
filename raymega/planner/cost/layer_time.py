"""Estimate the seconds of a transformer block for one micro-batch.

The times are those of one rank, added up over the kernels of a layer.
``raymega.planner.cost.block_times`` has those of each kind of block, ``raymega.planner.cost.stage_cost`` adds them up to stages, and ``raymega.planner.cost.step_time``
stages to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from raymega.config.schema import MemorySection
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.layers.layer_pattern import mean_keys
from raymega.plan.memory.activation_bytes import layer_bytes
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.planner.cost.context_cost import context_parallel_s
from raymega.planner.cost.expert_time import ExpertTime, expert_time
from raymega.planner.cost.linear_attention_time import (
    projections,
    state_exchange_s,
    states_s,
)
from raymega.planner.cost.tensor_parallel_time import (
    ProductPair,
    ProductTime,
    tensor_parallel_traffic,
)
from raymega.planner.kernels.kernel_time import (
    BACKWARD_ATTENTION,
    attention_s,
    host_s,
    matmul_s,
    memory_s,
    stream_s,
)
from raymega.planner.kernels.system_traits import Software

KERNELS_IN_A_BLOCK = 12
"""Kernel launches of a forward besides products and attention; a backward has twice as many."""
UNFUSED_FORWARD_BYTES = 13
"""Bytes moved for one attention weight: written as score, read and written by softmax and by
dropout with its mask, read by the product with v."""
UNFUSED_BACKWARD_BYTES = 17
NORM_STEPS_BYTES = 32
"""Bytes moved for one element beyond a fused norm's, where each operation is a kernel: to float32
and squared, mean, times the inverse, back to 16 bits, times the weight."""
ROTATION_STEPS_BYTES = 16
"""Bytes beyond a fused rotation's: to float32, turned as a complex number, back to 16 bits."""
GATE_STEPS_BYTES = 4
"""Bytes beyond a fused nonlinearity's: its result is written before it multiplies what it gates."""
GATE_PASSES, TURN_PASSES = 2, 3
"""Reads and writes of raymega's own kernels beyond a fused one's: silu(gate), written and read;
halves that are read for both of their products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds of one block for one micro-batch.

    Attributes:
        forward_s: Seconds of the forward's kernels.
        backward_s: Seconds of the backward's kernels, without recompute.
        attention_s: Seconds of the forward's kernels between q, k, v and the output projection.
        norms_s: Seconds of the forward's norms.
        activation_s: Seconds of the forward's nonlinearity.
        remade_s: Seconds of the products that selective recompute runs again.
        tensor_parallel_s: Exposed seconds of traffic over tp in one forward.
        hidden_s: Seconds by which a backward's traffic over tp is less exposed than a forward's.
        context_parallel_s: Exposed seconds of traffic over cp in one pass, by
            ``parallel.cp_method``.
        experts_s: Exposed seconds of sending tokens to experts and back in one pass.
        away_s: Seconds to offload what a forward keeps to the host, or to fetch it; 0 without
            offload.
        away_input_s: Seconds to offload or fetch the block's input alone.
    """

    forward_s: float
    backward_s: float
    attention_s: float
    norms_s: float
    activation_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    hidden_s: float = 0.0
    remade_s: float = 0.0
    experts_s: float = 0.0
    away_s: float = 0.0
    away_input_s: float = 0.0

    @property
    def traffic_s(self) -> float:
        """Exposed seconds of all traffic in one forward."""
        return self.tensor_parallel_s + self.context_parallel_s + self.experts_s

    def pass_s(
        self, recompute: str, parts: Collection[str] = ("attention",)
    ) -> tuple[float, float]:
        """Return the seconds of forward and backward, traffic and recompute included.

        ``recompute`` and ``parts`` are the values of ``memory.recompute`` and
        ``memory.recompute_parts``.
        """
        traffic = self.traffic_s
        selected = {
            "attention": self.attention_s,
            "norm": self.norms_s,
            "activation": self.activation_s,
        }
        again = {
            "none": 0.0,
            "selective": sum(selected[part] for part in parts) + self.remade_s,
            "full": self.forward_s + traffic,
        }
        # Offload overlaps the pass, and counts only where it takes longer.
        moving = self.away_input_s if recompute == "full" else self.away_s
        backward = self.backward_s + traffic - self.hidden_s + again[recompute]
        return max(moving, self.forward_s + traffic), max(moving, backward)


def layer_time(
    shape: ActivationShape,
    device: Accelerator,
    software: Software,
    *,
    has_experts: bool = False,
    has_states: bool = False,
    has_inner: bool = True,
) -> LayerTime:
    """Return the seconds of one block: attention or states, and a feed-forward layer (inner) if it has one."""
    is_counted = counts_traffic(shape, device, software)
    if not (software.has_newest_attention or _has_whole_rows(shape, software)):
        device = device.with_older_attention()
    inner_width = (
        shape.model.moe.shared_expert_intermediate_size
        if has_experts
        else shape.model.ffn_hidden_size * has_inner
    )
    # Matrix products.
    fp8_coverage = shape.fp8_coverage
    product_s = partial(matmul_s, device, is_8_bit=fp8_coverage.linears, element=shape.element)
    weights_s = partial(
        matmul_s, device, is_8_bit=fp8_coverage.weight_gradients, element=shape.element
    )
    inner = _inner_products(shape, inner_width)
    around = projections(shape) if has_states else _attention_products(shape)
    products = [*around, *inner]
    forward = sum(product_s(*sizes) for sizes in products)
    time_of = partial(_product_time, product_s=product_s, weights_s=weights_s)
    backward = sum(each.input_s + each.weight_s for each in map(time_of, products))
    # Attention, and kernels that memory traffic bounds.
    attention, attention_backward = (
        states_s(shape, device) if has_states else _attention(shape, device, software)
    )
    least_s = stream_s if is_counted else memory_s
    norms, activation, rest = (
        least_s(device, least) + stream_s(device, more)
        for least, more in zip(
            _element_bytes(shape, software, inner_width),
            _step_bytes(shape, software, inner_width),
            strict=True,
        )
    )
    others = norms + activation + rest
    # Launches of fused kernels run ahead of the device.
    launches = 0.0 if is_counted else KERNELS_IN_A_BLOCK * device.fitted.launch_s
    # Experts, whose transfers the shared expert overlaps.
    experts = ExpertTime(forward_s=0.0, backward_s=0.0, travel_s=0.0)
    if has_experts:
        shared_s = sum(product_s(*sizes) for sizes in inner)
        experts = expert_time(
            shape, device, shared_s=shared_s, sends_once_a_node=software.sends_once_a_node
        )
    forward_s = forward + attention + others + launches + experts.forward_s
    backward_s = backward + attention_backward + 2 * (others + launches) + experts.backward_s
    # With paired passes, transfers of one pass overlap kernels of the other, block by block.
    beside_s = (
        (forward_s + backward_s) / 2 if shape.parallel.overlap_moe_expert_parallel_comm else 0.0
    )
    # Traffic over tp: of each pair of products the first reads all positions, the second is summed.
    pairs = [around[-2:], *([inner] if inner else [])]
    traffic = tensor_parallel_traffic(
        shape,
        device,
        software,
        pairs=[ProductPair(*map(time_of, pair)) for pair in pairs],
    )
    return LayerTime(
        forward_s=forward_s,
        backward_s=backward_s,
        attention_s=attention,
        norms_s=norms,
        activation_s=activation,
        remade_s=sum(product_s(*sizes) for sizes in _remade(shape, software, inner_width)),
        tensor_parallel_s=traffic.forward_s,
        hidden_s=traffic.forward_s - traffic.backward_s,
        context_parallel_s=(state_exchange_s if has_states else context_parallel_s)(shape, device),
        experts_s=max(0.0, experts.travel_s - beside_s),
        **_away(shape, device, has_experts=has_experts),
    )


def _product_time(
    sizes: tuple[float, float, float],
    *,
    product_s: Callable[[float, float, float], float],
    weights_s: Callable[[float, float, float], float],
) -> ProductTime:
    """Return the seconds of a linear layer's three products, from rows, inner and columns of its forward."""
    rows, inner, columns = sizes
    return ProductTime(
        forward_s=product_s(*sizes),
        input_s=product_s(rows, columns, inner),
        weight_s=weights_s(inner, rows, columns),
    )


def _away(shape: ActivationShape, device: Accelerator, *, has_experts: bool) -> dict[str, float]:
    """Return the offload times of a block that keeps all activations, as most offloaded blocks do."""
    if "activations" not in shape.memory.offload:
        return {}
    whole = layer_bytes(replace(shape, memory=MemorySection()), has_experts=has_experts)
    return {"away_s": host_s(device, whole), "away_input_s": host_s(device, shape.stream_bytes)}


def _attention_products(shape: ActivationShape) -> list[tuple[float, float, float]]:
    """Return rows, inner and columns of the matrix products around attention in the forward."""
    model = shape.model
    into = _latent_products(shape) if model.mla.kv_lora_rank else _head_products(shape)
    features = model.num_heads * model.value_width / shape.parallel.tp
    return [*into, (shape.tokens, features, model.hidden_size)]


def _inner_products(shape: ActivationShape, inner_width: int) -> list[tuple[float, float, float]]:
    """Return the products of a feed-forward layer or a shared expert; none where its width is 0."""
    tokens, width, cut = shape.tokens, shape.model.hidden_size, inner_width / shape.parallel.tp
    up = cut * (2 if shape.family.has_gate else 1)
    return [(tokens, width, up), (tokens, cut, width)] if inner_width else []


def _head_products(shape: ActivationShape) -> list[tuple[float, float, float]]:
    """Return the product from the stream to queries, keys and values."""
    model, tp = shape.model, shape.parallel.tp
    heads = model.num_heads / tp + 2 * max(1, model.kv_heads // tp)
    return [(shape.tokens, model.hidden_size, heads * model.head_width)]


def _latent_products(shape: ActivationShape) -> list[tuple[float, float, float]]:
    """Return the products from the stream to queries, keys and values by way of latents.

    Every rank computes the latents of the part of the stream that it holds.
    """
    model, mla, heads = shape.model, shape.model.mla, shape.model.num_heads / shape.parallel.tp
    down = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
    return [
        (shape.stream_tokens, model.hidden_size, down),
        (shape.tokens, mla.q_lora_rank or model.hidden_size, heads * model.head_width),
        (shape.tokens, mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
    ]


def _attention(
    shape: ActivationShape, device: Accelerator, software: Software
) -> tuple[float, float]:
    """Return forward and backward seconds of attention itself, fused or not."""
    model = shape.model
    rows = shape.tokens * model.num_heads / shape.parallel.tp
    if software.has_fused_attention:
        width, element = model.head_width, shape.element
        seen = mean_keys(model, seq_len=shape.seq_len)
        forward = attention_s(device, rows, seen, width, element=element)
        return forward, BACKWARD_ATTENTION * forward
    # Without a fused kernel the [S, S] weights go through memory.
    share = device.peak_flops(shape.element) * device.fitted.matmul_share
    product = 2 * rows * shape.seq_len * model.head_width / share
    forward = 2 * product + memory_s(device, rows * shape.seq_len * UNFUSED_FORWARD_BYTES)
    backward = 4 * product + memory_s(device, rows * shape.seq_len * UNFUSED_BACKWARD_BYTES)
    return forward, backward


def _element_bytes(
    shape: ActivationShape, software: Software, inner_width: int
) -> tuple[float, float, float]:
    """Return the memory traffic of a forward besides products and attention.

    The order is norms, nonlinearity, rest. Two norms read and write the stream. Two sums read it
    twice and write it, with a mask where there is dropout. The nonlinearity reads the output of up
    (and gate) and writes. q, k and v are rotated or rearranged once.
    """
    element = shape.element
    norms, sums = 2 * 2 * element, 2 * 3 * element
    masks = 2 * (element + 1) if software.has_dropout else 0
    stream = shape.stream_tokens * shape.model.hidden_size
    hidden = shape.tokens * inner_width / shape.parallel.tp
    activation = hidden * element * (3 if shape.family.has_gate else 2)
    heads = shape.model.num_heads + 2 * shape.model.kv_heads
    qkv = shape.tokens * heads * shape.model.head_width / shape.parallel.tp
    return stream * norms, activation, stream * (sums + masks) + 2 * element * qkv


def _step_bytes(
    shape: ActivationShape, software: Software, inner_width: int
) -> tuple[float, float, float]:
    """Return the additional memory traffic of operations that are kernels of their own.

    The order is norms, nonlinearity, rest. Without fused kernels each operation is one, in 16 bits
    with a gate. With them only raymega's own gates and rotations are.
    """
    model, tp = shape.model, shape.parallel.tp
    turned = shape.tokens * (model.num_heads + model.kv_heads) * model.head_width / tp
    hidden = shape.tokens * inner_width / tp
    norms = 2 * shape.stream_tokens * model.hidden_size
    # Fused systems: the steps of raymega's own gates and rotations alone.
    if software.fuses_kernels:
        steps = shape.element * (software.makes_steps and not shape.is_fused)
        return (
            0.0,
            hidden * GATE_PASSES * steps * shape.family.has_gate,
            turned * TURN_PASSES * steps * shape.family.has_rope,
        )
    return norms * NORM_STEPS_BYTES, hidden * GATE_STEPS_BYTES, turned * ROTATION_STEPS_BYTES


def _remade(
    shape: ActivationShape, software: Software, inner_width: int
) -> list[tuple[float, float, float]]:
    """Return the products that selective recompute runs again, each matrix apart as in modules."""
    model, tokens, tp = shape.model, shape.tokens, shape.parallel.tp
    heads, kv = (n * model.head_width / tp for n in (model.num_heads, model.kv_heads))
    up = [(tokens, model.hidden_size, inner_width / tp)] * (2 if shape.family.has_gate else 1)
    into = [(tokens, model.hidden_size, features) for features in (heads, kv, kv)]
    out, down = (tokens, heads, model.hidden_size), (tokens, inner_width / tp, model.hidden_size)
    # Forward order matters: every second product counts from it.
    each: list[tuple[float, float, float]] = [*into, out, *up, down]
    return {"nothing": [], "every_second": each[1::2], "products": each}[software.remakes]


def counts_traffic(shape: ActivationShape, device: Accelerator, software: Software) -> bool:
    """Return whether the traffic of element-wise kernels is counted in full: raymega's, fused, on a GPU.

    Of other systems the least possible traffic is known, at a rate that was fitted to their runs.
    """
    return software.makes_steps and shape.is_fused and device.num_cores > 1


def _has_whole_rows(shape: ActivationShape, software: Software) -> bool:
    """Return whether torch gives raymega the newest attention: to rows that a rank has whole."""
    return software.makes_steps and shape.parallel.cp == 1
