"""List the tensors of layers with a state in place of attention: gated delta nets and Mamba-2."""

from __future__ import annotations

from math import sqrt

from raymega.config.schema import ModelSection
from raymega.plan.layers.global_tensor import GlobalTensor, Role
from raymega.plan.layers.layer_pattern import MAMBA


def state_tensors(at: str, model: ModelSection, kind: str) -> list[GlobalTensor]:
    """Return projections, convolutions by channel, vectors of the states, norm and output of a layer of ``kind``."""
    sizes, heads = model.linear_attention, model.linear_attention.num_value_heads
    keys, values = sizes.num_key_heads * sizes.key_head_dim, heads * sizes.value_head_dim
    is_mamba = kind == MAMBA
    # projections, of which the convolution mixes three
    widths = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    convolved = ("q", "k", "v")
    if is_mamba:
        widths = {"z": values, "x": values, "B": keys, "C": keys, "dt": heads}
        convolved = ("x", "B", "C")
    std, width = model.initializer_range, model.hidden_size
    table = [
        _tensor(f"{at}.{name}.weight", (out, width), "normal", std=std)
        for name, out in widths.items()
    ]
    # variance of torch's own initial values of a convolution: 1 / (3 taps)
    for name in convolved:
        shape = (widths[name], 1, sizes.conv_kernel_dim)
        of_taps = 1 / sqrt(3 * sizes.conv_kernel_dim)
        table.append(
            _tensor(f"{at}.{name}_conv.weight", shape, "normal", std=of_taps, role="filter")
        )
        if is_mamba:
            table.append(_tensor(f"{at}.{name}_conv.bias", (widths[name],), "zeros", role="bias"))
    vectors = {"A_log": "log_uniform", "dt_bias": "ones"}
    if is_mamba:
        vectors |= {"dt_bias": "step", "D": "ones"}
    for name, init in vectors.items():
        table.append(_tensor(f"{at}.{name}", (heads,), init, role="bias", is_wide=True))
    # a norm of all groups' features, or one that all value heads share
    norm = _tensor(f"{at}.norm.weight", (values,), "ones", role="norm")
    if not is_mamba:
        norm = _tensor(
            f"{at}.norm.weight", (sizes.value_head_dim,), "ones", role="norm", tp_dim=-1, serves_heads=True
        )  # fmt: skip
    std /= sqrt(2 * model.num_layers)
    out = _tensor(f"{at}.out.weight", (width, values), "normal", std=std, tp_dim=1)
    return [*table, norm, out]


def _tensor(  # noqa: PLR0913  # fields of a tensor
    name: str,
    shape: tuple[int, ...],
    init: str,
    *,
    std: float = 0.0,
    role: Role = "matrix",
    tp_dim: int = 0,
    is_wide: bool = False,
    serves_heads: bool = False,
) -> GlobalTensor:
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init=init, initializer_range=std, role=role, is_wide=is_wide,
        serves_heads=serves_heads,
    )  # fmt: skip
