"""megatron-core's own Bert and T5 models as outside witnesses: the same losses with the same weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.parallel.context_parallel.context import EncoderInput, whole_rows
from raymega.plan.grid import Grid
from tests.dist.model.test_hugging_face import _blocks
from tests.support.ranks import run_grid
from tests.support.references import hf_encoders, hf_t5, megatron_models
from tests.support.references.imported import imported
from tests.unit.model.parts import make_stage_modules

pytestmark = [pytest.mark.dist, pytest.mark.wide]
LIMIT, FLOAT32_LIMIT = 1e-11, 1e-6
"""Of losses from logits in float64, and of its own losses, which are float32 whatever the model is."""
SOURCE, TARGET = 40, 16


def _tokens(*shape):
    return torch.randint(2, 259, shape, generator=torch.Generator().manual_seed(5))


def _module(tmp_path, theirs, **changes):
    """Our model with the weights of transformers' model, on one stage."""
    done = imported(tmp_path, theirs)
    (module,) = make_stage_modules(done.model.model_copy(update=changes))
    store, manifest = open_checkpoint(done.uri)
    load(store, manifest, _blocks(module))
    return module.eval()


def _bert_losses(_env, weights):
    """megatron-core's loss of each token [B, S], its logits [B, S, V] and those of pairs [B, 2]."""
    with torch.no_grad(), megatron_models.on_cpu():
        model, tokens = megatron_models.bert(weights, num_layers=3), _tokens(3, SOURCE)
        types = (torch.arange(SOURCE) > 11).long().expand(3, -1)
        given = tokens, torch.ones_like(tokens), types
        return model(*given, lm_labels=tokens.flip(1))[0], *model(*given)


def test_bert_has_the_losses_of_megatron_core(tmp_path):
    pytest.importorskip("megatron.core.models.bert.bert_model")
    theirs = hf_encoders.make_model("megatron-bert")
    weights = {name: values.detach() for name, values in theirs.state_dict().items()}
    ((losses, logits, of_pairs),) = run_grid(_bert_losses, Grid(), weights)
    module, tokens = _module(tmp_path, theirs), _tokens(3, SOURCE)
    classes = torch.tensor([0, 1, 1])
    pairs = EncoderInput(
        token_types=(torch.arange(SOURCE) > 11).long().expand(3, -1), first=torch.arange(3), labels=classes
    )  # fmt: skip
    mask = (torch.arange(SOURCE) % 7 == 3).double().expand(3, -1)
    with torch.no_grad():
        x = module._residual_stream(
            tokens,
            None,
            module._token_layout(whole_rows(SOURCE, tokens.device), mask, None),
            pairs.token_types,
        )
        ours = module.head.loss_sum(x, tokens.flip(1), mask)
        our_pairs = module.head.segment_pairs.loss_sum(module.head.norm(x), pairs)
    exact = cross_entropy(logits.transpose(1, 2), tokens.flip(1), reduction="none")
    assert float(ours) == pytest.approx(float((exact * mask).sum()), rel=LIMIT)
    assert float(ours) == pytest.approx(float((losses * mask).sum()), rel=FLOAT32_LIMIT)
    wanted = cross_entropy(of_pairs, classes, reduction="sum")
    assert float(our_pairs) == pytest.approx(float(wanted), rel=LIMIT)


def _t5_losses(_env, weights):
    """megatron-core's loss of each token of the decoder, [B, T], and its logits [B, T, V]."""
    with torch.no_grad(), megatron_models.on_cpu():
        model, tokens = megatron_models.t5(weights, (2, 3)), _tokens(3, SOURCE + TARGET)
        source, target = tokens[:, :SOURCE], tokens[:, SOURCE:]
        future = torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1)
        masks = [torch.zeros(n, SOURCE, dtype=torch.bool) for n in (SOURCE, TARGET)]
        masks = [each.expand(3, 1, -1, -1) for each in (masks[0], future, masks[1])]
        return model(source, target, *masks, lm_labels=target.flip(1)), model(
            source, target, *masks
        )


def test_t5_has_the_losses_of_megatron_core(tmp_path):
    pytest.importorskip("megatron.core.models.T5.t5_model")
    theirs = hf_t5.make_model("t5_v1_1")
    with torch.no_grad():  # without positions: see megatron_models.t5
        for stack in (theirs.encoder, theirs.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.zero_()
    weights = {name: values.detach() for name, values in theirs.state_dict().items()}
    ((losses, logits),) = run_grid(_t5_losses, Grid(), weights)
    module = _module(tmp_path, theirs)
    module.decoder_seq_len = TARGET
    tokens, mask = _tokens(3, SOURCE + TARGET), torch.ones(3, SOURCE + TARGET)
    labels = torch.cat((tokens[:, :SOURCE], tokens[:, SOURCE:].flip(1)), 1)
    with torch.no_grad():
        ours = module(tokens, labels, mask, None)
    exact = cross_entropy(logits.transpose(1, 2), labels[:, SOURCE:], reduction="sum")
    assert float(ours) == pytest.approx(float(exact), rel=LIMIT)
    assert float(ours) == pytest.approx(float(losses.sum()), rel=FLOAT32_LIMIT)
