"""Small random encoders of transformers in float64: BERT, RoBERTa, Megatron-LM's BERT."""

import importlib

import torch

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 259,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# A row of padding gets no gradient there, so BERT's has none.
KINDS = {
    "bert": ("bert", "BertForPreTraining", {"pad_token_id": None}),
    "bert-masked": ("bert", "BertForMaskedLM", {"pad_token_id": None, "type_vocab_size": 3}),
    "megatron-bert": ("megatron_bert", "MegatronBertForPreTraining", {"pad_token_id": None}),
    "roberta": (
        "roberta",
        "RobertaForMaskedLM",
        {"pad_token_id": 1, "max_position_embeddings": 42},
    ),
    "bert-untied": (
        "bert",
        "BertForPreTraining",
        {"pad_token_id": None, "tie_word_embeddings": False},
    ),
    "roberta-untied": (
        "roberta",
        "RobertaForMaskedLM",
        {"pad_token_id": 1, "max_position_embeddings": 42, "tie_word_embeddings": False},
    ),
}
HAVE_PAIRS = ("bert", "megatron-bert", "bert-untied")


def make_model(kind, seed=0):
    """A model whose every parameter is random: no zero biases or unit norms to hide a mistake."""
    folder, name, fields = KINDS[kind]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind_of_config = getattr(module, f"{name.partition('For')[0]}Config")
    config = kind_of_config(**SIZES | fields, attn_implementation="eager")
    model = getattr(module, name)(config).double().eval()
    _leave_out_unread_bias(model)
    # built-in tokens have the padding's id too: here it is a token as others
    model.base_model.embeddings.word_embeddings.padding_idx = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, values in model.named_parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in path else 0.0))
    return model


def load_model(kind, folder):
    """Load a folder with the class of transformers that made it."""
    name = KINDS[kind][1]
    module = importlib.import_module(
        f"transformers.models.{KINDS[kind][0]}.modeling_{KINDS[kind][0]}"
    )
    found = getattr(module, name)
    model = found.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    _leave_out_unread_bias(model)
    return model


def _leave_out_unread_bias(model):
    """Remove the bias beside an untied head's, which transformers 5 keeps and never reads."""
    head = model.lm_head if hasattr(model, "lm_head") else model.cls.predictions
    if not model.config.tie_word_embeddings:
        del head.bias


def outputs(model, tokens, token_types):
    """Logits of the vocabulary [B, S, V], and of pairs [B, 2] or None."""
    # RoBERTa's positions begin behind the padding's row
    first = 2 if model.config.model_type == "roberta" else 0
    positions = torch.arange(first, first + tokens.shape[1])[None]
    made = model(input_ids=tokens, token_type_ids=token_types, position_ids=positions)
    if "prediction_logits" in made:
        return made.prediction_logits, made.seq_relationship_logits
    return made.logits, None
