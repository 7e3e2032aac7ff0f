"""A model's chat template: rendered by transformers in jinja's sandbox.

It owns where the template comes from and the variables that it sees. What of the text a model learns is decided
by `raymega.prepare.chat.targets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from raymega.data.format import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from raymega.data.tokenizer_files import template_of, token_text
from raymega.errors import ConfigError, Fault
from raymega.extras import import_extra

VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that templates name; the settings of a tokenizer hold them."""
DAY = date(2024, 7, 26)
"""Day that templates write which ask for one: that of Llama's where it is told none. A dataset does not depend on its day."""
ASKS_FOR_DAY, CODES = (
    "strftime_now",
    ("%d", "%-d", "%b", "%B", "%m", "%Y", "%y", "%A", "%a", "%H", "%M", "%S"),
)
_REPLACED = "".join(f"|replace({code!r}, {DAY.strftime(code)!r})" for code in CODES)
# In place of transformers' function of that name; the line end goes with the tag before it.
_FIXED_DAY = f"{{% macro {ASKS_FOR_DAY}(format) %}}{{{{ format{_REPLACED} }}}}{{% endmacro %}}\n"
# What marks the text of the assistant: https://huggingface.co/docs/transformers/chat_templating
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderError(ValueError):
    """A template refuses a conversation, or does not render it as needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """Template of a tokenizer.

    Attributes:
        source: Text of the template.
        variables: Special tokens by the names that the template gives them.
    """

    source: str
    variables: tuple[tuple[str, str], ...]

    @property
    def marks_answers(self) -> bool:
        """True if the template itself says which text is the assistant's."""
        return bool(_GENERATION.search(self.source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        *,
        is_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages of the conversation, or the first few of them.
            tools: Tools that the messages may call.
            is_prompt: True to end with what comes before the assistant's next message.

        Raises:
            RenderError: The template refuses the conversation.
        """
        return self._render(messages, tools, add_generation_prompt=is_prompt)[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the characters [start, stop) that the template marks."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], **options: bool
    ) -> tuple[str, Any]:
        utilities = import_extra(
            "transformers.utils.chat_template_utils", extra="hf", purpose="--format chat"
        )
        fixed = _FIXED_DAY if ASKS_FOR_DAY in self.source else ""
        try:
            texts, marks = utilities.render_jinja_template(
                conversations=[list(messages)], tools=list(tools) or None,
                chat_template=fixed + self.source, **options, **dict(self.variables),
            )  # fmt: skip
        except Exception as error:  # a template may raise anything
            raise RenderError(f"the chat template: {type(error).__name__}: {error}") from error
        return texts[0], marks[0] if marks else []


def find_template(files: Mapping[str, bytes], *, path: str, tokenizer: str) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
        files: Files of the tokenizer, by name.
        path: File with another template; empty for the tokenizer's own.
        tokenizer: Name of the tokenizer, for the refusal.

    Raises:
        ConfigError: There is no template, or the file cannot be read.
    """
    settings = json.loads(files.get(TOKENIZER_CONFIG_FILE, b"{}"))
    source = _read(path) if path else template_of(files)
    if not source:
        raise ConfigError(_no_template(tokenizer))
    named = ((name, token_text(settings.get(name))) for name in VARIABLES)
    return ChatTemplate(
        source=source, variables=tuple((name, token) for name, token in named if token)
    )


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = Fault(
            fact=f"--chat-template {path} cannot be read: {error}",
            rule="it is a file with a jinja template",
            remedy="give the chat_template.jinja of the model",
        )
        raise ConfigError(fault) from error


def _no_template(tokenizer: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {tokenizer} has no chat template",
        rule=f"conversations are rendered by the model's own template: {TEMPLATE_FILE}, or chat_template in "
        f"{TOKENIZER_CONFIG_FILE}",
        remedy="give the folder of the model that is tuned, or --chat-template FILE",
    )
