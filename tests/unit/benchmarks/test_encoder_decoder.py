"""Counts of encoder-decoder models against published models and against torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.encoder_decoder import EncoderDecoder

SMALL = EncoderDecoder(
    encoder_layers=6, decoder_layers=6, width=512, num_heads=8, head_width=64, ffn_hidden_size=2048, vocab_size=32128
)  # fmt: skip
XXL = EncoderDecoder(
    encoder_layers=24, decoder_layers=24, width=4096, num_heads=64, head_width=64, ffn_hidden_size=10240,
    vocab_size=32128, is_gated=True, tie_word_embeddings=False,
)  # fmt: skip
ELEVEN_B = EncoderDecoder(
    encoder_layers=24, decoder_layers=24, width=1024, num_heads=128, head_width=128, ffn_hidden_size=65536,
    vocab_size=32128,
)  # fmt: skip


def transformers_model(model: EncoderDecoder) -> T5ForConditionalGeneration:
    config = T5Config(
        num_layers=model.encoder_layers, num_decoder_layers=model.decoder_layers, d_model=model.width,
        num_heads=model.num_heads, d_kv=model.head_width, d_ff=model.ffn_hidden_size,
        vocab_size=model.vocab_size, feed_forward_proj="gated-gelu" if model.is_gated else "relu",
        tie_word_embeddings=model.tie_word_embeddings,
    )  # fmt: skip
    with torch.device("meta"):
        return T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("model", "published"), [(SMALL, 60_506_624), (ELEVEN_B, 11_307_321_344), (XXL, 11_135_332_352)]
)
def test_parameters_are_those_of_the_published_checkpoints(model, published):
    assert model.num_parameters() == published


@pytest.mark.parametrize("model", [SMALL, ELEVEN_B])
def test_parameters_are_those_that_transformers_makes(model):
    parameters = transformers_model(model).parameters()
    assert model.num_parameters() == sum(each.numel() for each in parameters)


def test_operations_are_those_that_torch_counts_without_a_causal_mask():
    """torch counts the whole square of the decoder's own attention, of which half is asked for."""
    source, target = 48, 20
    network = transformers_model(SMALL)
    ids = {"input_ids": source, "decoder_input_ids": target}
    tokens = {name: torch.zeros(1, n, dtype=torch.long, device="meta") for name, n in ids.items()}
    with FlopCounterMode(display=False) as counter:
        network(**tokens, use_cache=False)
    masked = 2 * SMALL.num_heads * SMALL.head_width * target**2 * SMALL.decoder_layers
    expected = SMALL.flops_per_pair(source_tokens=source, target_tokens=target) / 3 + masked
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)
