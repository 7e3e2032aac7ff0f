"""A tokenizer with special tokens of several models, and chat templates as these models have them."""

import json

from tokenizers import Tokenizer

from raymega.prepare.chat.template import ChatTemplate
from raymega.prepare.tokenizer.trained import train_bpe

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|begin_of_text|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
VARIABLES = (("bos_token", "<s>"), ("eos_token", "</s>"))

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "message['content'] + ' [/INST]' }}{% elif message['role'] == 'system' %}{{ '<<SYS>>' + "
    "message['content'] + '<</SYS>>' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' + "
    "message['content'] + eos_token }}{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] "
    "+ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' "
    "else message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
# Thinks aloud only in the last answer, as some models do.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + ('[thought] ' if loop.last "
    "else '') + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What each ends an answer with.
ENDS = {
    "chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "llama2": (LLAMA2, " </s>"),
    "zephyr": (ZEPHYR, "</s>"), "gemma": (GEMMA, "<end_of_turn>"),
}  # fmt: skip


def make_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer with the special tokens of all templates."""
    made = json.loads(
        train_bpe(["user assistant system: who wrote this? it was he"] * 3, vocab_size)
    )
    first = max(made["model"]["vocab"].values()) + 1
    one = made["added_tokens"][0]
    made["added_tokens"] += [
        one | {"id": first + number, "content": token} for number, token in enumerate(SPECIAL)
    ]
    return Tokenizer.from_str(json.dumps(made))


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, variables=VARIABLES)


def messages(*turns: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn; those that begin with / are the system's."""
    roles = iter(("user", "assistant") * len(turns))
    return [
        {"role": "system", "content": turn[1:]}
        if turn.startswith("/")
        else {"role": next(roles), "content": turn}
        for turn in turns
    ]
