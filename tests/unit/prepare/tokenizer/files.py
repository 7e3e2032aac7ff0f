"""Small tokenizers in the published formats, made in the test."""

import base64
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "def f(x):\n    return x  # caf\u00e9 \U0001f600\n" * 20
ODD = [
    "  two  spaces  ", "a\n\nb\t c", "\u4e2d\u6587 caf\u00e9 \U0001f600", " ", "\u00a0x\u3000y", "\ufb01 \u2460",
    "</s> <s> <unk> <|endoftext|> [END]", "I'll 12345 don't", "\x00\x7f", TEXT,
]  # fmt: skip


def write_llama3_like(folder, **config):
    """A tokenizer.json with <begin> and <end>, whose post-processor begins each text, and its settings."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<begin>", "<end>", "<turn>")]
    )
    begin = tokenizer.token_to_id("<begin>")
    template = processors.TemplateProcessing(
        single="<begin> $A", pair="<begin> $A <begin>:1 $B:1", special_tokens=[("<begin>", begin)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<begin>", "__type": "AddedToken"}, "eos_token": "<end>",
        "tokenizer_class": "LlamaTokenizerFast", "auto_map": {"AutoTokenizer": ["code.Mine", None]},
        "model_max_length": 64, "chat_template": "{{ messages }}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return folder


def write_sentencepiece(path, texts=(TEXT, "one two  three 123\n" * 20), **changes):
    """A model as Llama 2's: BPE with bytes, spaces as they are; by ``changes`` another."""
    import sentencepiece

    options = {
        "model_type": "bpe", "vocab_size": 340, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "hard_vocab_limit": False, "minloglevel": 2,
    }  # fmt: skip
    corpus = path.with_suffix(".txt")
    corpus.write_text("".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(path.with_suffix("")), **(options | changes)
    )
    return path


def write_tiktoken(path, *words):
    """Ranks of all bytes, then of ``words`` and all their beginnings."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in words:
        tokens += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in tokens]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_all(files, folder):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
