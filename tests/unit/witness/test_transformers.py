"""transformers as a witness: learning rates, the balancing loss, multi-token prediction, packed documents."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from raymega.config.moe import MoeSection
from raymega.config.schema import ModelSection, OptimizerSection
from raymega.data.rows import Row, later_of, positions_of
from raymega.model.moe.load_balancing import auxiliary_loss
from raymega.model.moe.router import choose
from raymega.optim.lr_schedule import learning_rate
from raymega.parallel.comm.process_groups import alone
from raymega.parallel.context_parallel.context import Rows
from raymega.parallel.expert_parallel.token_ids import TokenIds
from tests.support.references.hf_models import SIZES, in_float64, make_model
from tests.unit.model.parts import make_stage_modules

WARMUP, END, COOLDOWN, PEAK, LOW = 7, 60, 20, 3.0, 0.1


def _factors(name):
    """Functions of the number of steps to a share of the peak, from a scheduler that drives nothing."""
    from transformers import optimization as theirs

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    match name:
        case "cosine":
            made = theirs.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, WARMUP, END, min_lr_rate=LOW
            )
        case "linear":
            made = theirs.get_polynomial_decay_schedule_with_warmup(
                optimizer, WARMUP, END, lr_end=PEAK * LOW, power=1.0
            )
        case "wsd":
            made = theirs.get_wsd_schedule(
                optimizer, WARMUP, COOLDOWN, num_stable_steps=END - WARMUP - COOLDOWN,
                decay_type="linear", min_lr_ratio=LOW,
            )  # fmt: skip
        case "inverse_sqrt":
            made = theirs.get_inverse_sqrt_schedule(optimizer, WARMUP)
        case "constant":
            made = theirs.get_constant_schedule_with_warmup(optimizer, WARMUP)
    return made.lr_lambdas[0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_learning_rates(name):
    """Update n has transformers' rate of n steps; wsd's warm-up there starts at the minimum."""
    cooldown = {"lr_cooldown_steps": COOLDOWN} if name == "wsd" else {}
    section = OptimizerSection(
        lr=PEAK,
        min_lr_ratio=LOW,
        lr_schedule=name,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=END,
        **cooldown,
    )
    factor = _factors(name)
    # behind its end transformers' cosine rises again
    for number in range(WARMUP if name == "wsd" else 1, END + (1 if name == "cosine" else 20)):
        found = learning_rate(section, total_steps=100, step=number - 1)
        assert found == pytest.approx(PEAK * factor(number), rel=1e-12), number


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balancing_loss(top_k):
    """Theirs is a mean over tokens, and counts a token once for each of its experts."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    num, E = 40, 6
    logits = torch.randn(num, E, generator=torch.Generator().manual_seed(top_k)).double()
    counted = torch.arange(num) % 4 > 0
    moe = MoeSection(
        num_experts=E, top_k=top_k, load_balancing_type="micro_batch", router_aux_loss_coef=0.5,
        norm_topk_prob=top_k > 1,
    )  # fmt: skip
    scores = logits.softmax(1)
    chosen, _ = choose(scores, moe)
    load = chosen[counted].flatten().bincount(minlength=E).double()
    found = auxiliary_loss(
        moe, scores, chosen, TokenIds(numbers=torch.arange(num), is_counted=counted, row_length=num),
        totals=torch.cat((load, counted.sum()[None].double())), last=None, micro=alone(0),
    )  # fmt: skip
    theirs = load_balancing_loss_func((logits,), E, top_k, counted.long()[None])
    wanted = 0.5 * counted.sum() * theirs.double() / top_k
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # float32


PARTS = {
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
ENDS = {"embedding.tokens": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"}


def _llama(depth=0):
    """transformers' Llama, our model of it, and its stage; the last ``depth`` blocks are those further ahead.

    What transformers' has no such of, the norms and the join before those, is drawn.
    """
    theirs = make_model("llama2")
    model = ModelSection(
        family="llama", num_layers=SIZES["num_hidden_layers"] - depth, hidden_size=SIZES["hidden_size"],
        num_heads=8, num_kv_heads=8, ffn_hidden_size=SIZES["intermediate_size"], vocab_size=SIZES["vocab_size"],
        max_positions=40, tie_word_embeddings=False, norm_eps=theirs.config.rms_norm_eps,
        rope_theta=theirs.config.rope_parameters["rope_theta"], num_nextn_predict_layers=depth,
        mtp_loss_scaling_factor=0.3,
    )  # fmt: skip
    (module,) = make_stage_modules(model)
    generator, own = torch.Generator().manual_seed(3), {}
    for piece, values in (
        (piece, p.detach()[piece.place]) for p in module.parameters() for piece in p.spec.pieces
    ):
        name = piece.tensor.name.removesuffix(".weight")
        if found := _name_there(name, model):
            values[: piece.tensor.real_rows].copy_(theirs.get_parameter(f"{found}.weight"))
        else:
            values.copy_(0.3 * torch.randn(values.shape, generator=generator) + (values.ndim == 1))
        own[name] = values
    return theirs, model, module, own


def _name_there(name, model):
    """transformers' name of a tensor of ours, or none."""
    if name in ENDS:
        return ENDS[name]
    kind, number, part = name.split(".", 2)
    layer = int(number) + (model.num_layers if kind == "mtp" else 0)
    return f"model.layers.{layer}.{PARTS[part]}" if part in PARTS else ""


def _blocks(theirs, x, layers):
    """Blocks of transformers' model on whole causal rows x [B, S, D]."""
    places = torch.arange(x.shape[1])[None]
    rotations = theirs.model.rotary_emb(x, places)
    for layer in layers:
        x = theirs.model.layers[layer](x, position_ids=places, position_embeddings=rotations)
    return x


def _rms_norm(x, weight, model):
    return x * (x.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt() * weight


def _draw(rows, length):
    return torch.randint(
        SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(rows)
    )


def test_multi_token_prediction_is_that_of_its_paper_with_transformers_blocks():
    """DeepSeek-V3, equations 21 to 25: sequences that get shorter, where ours are masked; loss and gradient."""
    depth, length = 2, 11
    theirs, model, module, own = _llama(depth)
    windows = _draw(3, length + 1)
    tokens, labels = windows[:, :-1], windows[:, 1:]
    mask = torch.ones(3, length, dtype=torch.float64)
    rows = [
        Row(tokens=t.numpy(), labels=n.numpy(), mask=m.bool().numpy(), documents=(length,))
        for t, n, m in zip(tokens, labels, mask, strict=True)
    ]
    ahead = [later_of(row, depth) for row in rows]
    later = tuple(
        torch.stack([torch.from_numpy(each[part]) for each in ahead], 1) for part in (0, 1)
    )
    loss = module(tokens, labels, mask, None, later=(later[0], later[1].double()))
    loss.backward()

    def next_token_loss(hidden, wanted):
        scores = theirs.lm_head(hidden).flatten(0, 1)
        return cross_entropy(scores, wanted.flatten(), reduction="sum")

    with in_float64(theirs):
        hidden = _blocks(theirs, theirs.model.embed_tokens(tokens), range(model.num_layers))
        hidden = theirs.model.norm(hidden)
        wanted, further = next_token_loss(hidden, labels), 0.0
        for k in range(1, depth + 1):
            at, left = f"mtp.{k - 1}", length - k
            token = theirs.model.embed_tokens(windows[:, k : k + left])
            parts = (
                _rms_norm(token, own[f"{at}.token_norm"], model),
                _rms_norm(hidden[:, :left], own[f"{at}.hidden_norm"], model),
            )
            joined = torch.cat(parts, -1) @ own[f"{at}.join"].T
            hidden = _blocks(theirs, joined, [model.num_layers + k - 1])
            hidden = _rms_norm(hidden, own[f"{at}.final_norm"], model)
            further = further + next_token_loss(hidden, windows[:, k + 1 :])
        (wanted + 0.3 / depth * further).backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.as_tensor(module.take_mtp_loss_sum()), further.detach(), rtol=1e-12, atol=0
    )
    found = module.embedding.tokens.weight.grad[: model.vocab_size]
    torch.testing.assert_close(found, theirs.model.embed_tokens.weight.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("documents", [(12, 7, 1, 4), (24,), (1, 1, 22)], ids=str)
def test_packed_documents_are_those_that_transformers_sees_alone(documents):
    theirs, model, module, _ = _llama()
    window = _draw(1, sum(documents) + 1)
    tokens, labels = window[:, :-1], window[:, 1:]
    rows = Rows(torch.from_numpy(positions_of(documents))[None], (documents,))
    loss = module(tokens, labels, torch.ones_like(tokens).double(), None, rows=rows)
    wanted, first = 0.0, 0
    with in_float64(theirs):
        for length in documents:
            part = slice(first, first + length)
            scores = theirs(tokens[:, part]).logits[0]
            wanted = wanted + cross_entropy(scores, labels[0, part], reduction="sum")
            first += length
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-12, atol=0)
    loss.backward()
    wanted.backward()
    found = module.embedding.tokens.weight.grad[: model.vocab_size]
    torch.testing.assert_close(found, theirs.model.embed_tokens.weight.grad, rtol=0, atol=1e-11)
