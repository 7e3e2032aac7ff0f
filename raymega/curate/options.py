"""Options of each step of a recipe, with their published defaults.

It owns names, bounds and descriptions. `raymega.curate.recipe` reads a recipe into them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import Fraction, NonNegative, NonNegativeFloat, Positive, Section

Families = Literal["gopher", "gopher_repetition", "c4", "fineweb"]
Files = tuple[str, ...]


class Extract(Section):
    """Text of web pages, as `raymega data prepare` reads them."""


class Mend(Section):
    """Text that was decoded wrongly, mended by ftfy where a cheap test finds it."""


class Language(Section):
    """Language of a document, of its first characters."""

    keep: tuple[str, ...] = ()
    """ISO 639 codes of the languages that are kept; empty keeps all."""
    engine: Literal["cascade", "fasttext"] = "cascade"
    """cascade asks py3langid where fastText's score is below second_opinion_below; fasttext is faster."""
    second_opinion_below: Fraction = 0.65
    """Score of fastText below which py3langid decides."""
    min_score: Fraction = 0.0
    """Least score of fastText for a document to be kept; FineWeb has 0.65."""
    characters: Positive = 2000
    """Number of characters at the beginning that are asked about."""


class Quality(Section):
    """Rules of Gopher, C4 and FineWeb, as published."""

    rules: tuple[Families, ...] = ("gopher", "gopher_repetition", "c4", "fineweb")
    """Families of rules, in order."""
    languages: tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...] = ("en",)
    """Languages that the rules are asked about, as their numbers were chosen for English; empty is all."""
    min_words: NonNegative = 50
    """Least number of words of a document (Gopher)."""
    max_words: Positive = 100_000
    """Largest number of words of a document (Gopher)."""
    min_sentences: NonNegative = 5
    """Least number of sentences of a document (C4)."""
    min_words_per_line: NonNegative = 3
    """Least number of words of a line (C4)."""
    needs_punctuation: bool = True
    """True removes lines without an end mark, as C4 does; FineWeb leaves them."""
    refuses_brackets: bool = True
    """True removes documents with a curly bracket, as C4 does."""


class QualityModel(Section):
    """Logistic regression on hashed words, trained by `raymega data train-quality`."""

    model: Annotated[str, Field(min_length=1)]
    """File of the model."""
    pareto_alpha: NonNegativeFloat = 9.0
    """Shape of the Pareto draw (GPT-3, MT-NLG): a document is kept if the draw is above 1 - score; 0 draws nothing."""
    min_score: Fraction = 0.0
    """Least score for a document to be kept."""


class Personal(Section):
    """Personal data, masked."""

    kinds: tuple[Literal["email", "ip", "phone"], ...] = ("email", "ip", "phone")
    """Kinds that are masked."""
    email: str = "email@example.com"
    """Text in place of an e-mail address."""
    ip: str = "192.0.2.1"
    """Text in place of a public IP address."""
    phone: str = "+1 202-555-0100"
    """Text in place of a phone number."""


class Exact(Section):
    """Copies: of documents with the same text the one with the smallest id is kept."""

    ignores_space: bool = False
    """True takes texts that differ in white space and case alone for copies."""


class Near(Section):
    """Near duplicates: MinHash finds pairs, the true Jaccard similarity of each decides."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Least Jaccard similarity to a kept document for a document to be removed."""
    words: Positive = 5
    """Number of words of a shingle; in scripts without spaces each character is a word."""
    bands: Annotated[int, Field(ge=1, le=1000)] = 16
    """Number of bands; two documents are compared if one band is equal."""
    rows: Annotated[int, Field(ge=1, le=100)] = 8
    """Number of MinHashes of a band."""
    seed: NonNegative = 1
    """Seed of the hashes."""


class Lines(Section):
    """Lines or paragraphs that stand in the corpus before: the one in the smallest id is kept."""

    unit: Literal["line", "paragraph"] = "line"
    """Unit that is compared: lines, or paragraphs between blank lines."""
    min_characters: Positive = 20
    """Least length of what is compared; shorter ones are kept."""
    copies: Positive = 1
    """Number of copies that are kept."""


class Decontaminate(Section):
    """Text of evaluation tasks, cut out with its surroundings as GPT-3 and MT-NLG did."""

    tasks: Annotated[Files, Field(min_length=1)]
    """Files of tasks: .jsonl or .json, of which every string counts, or text, of which every line counts."""
    words: Annotated[int, Field(ge=8, le=100)] = 13
    """Number of equal words in a row that is a hit."""
    window: NonNegative = 200
    """Number of characters that are cut on both sides of a hit."""
    min_characters: NonNegative = 200
    """Least length of a piece that is kept."""
    max_pieces: Positive = 10
    """Largest number of pieces; a document in more is removed."""


class Urls(Section):
    """Pages of unwanted domains and addresses."""

    lists: Annotated[Files, Field(min_length=1)]
    """Files with a domain, which has all below it, or the beginning of an address in each line."""


class Sample(Section):
    """Share of the documents, drawn by a hash of their ids."""

    rate: Fraction = 1.0
    """Share of the documents of other sources."""
    sources: dict[str, Fraction] = Field(default_factory=dict)
    """Share by pattern of the source, such as '*/forum/*': 0.1; the first that matches counts."""
    seed: Annotated[int, Field(ge=0, lt=10**10)] = 0
    """Seed of the draw, of at most ten digits."""


OPTIONS: dict[str, type[Section]] = {
    "extract": Extract,
    "mend": Mend,
    "language": Language,
    "quality": Quality,
    "quality_model": QualityModel,
    "personal": Personal,
    "exact": Exact,
    "near": Near,
    "lines": Lines,
    "decontaminate": Decontaminate,
    "urls": Urls,
    "sample": Sample,
}
"""The steps in their default order."""
DEFAULT_STEPS = ("extract", "mend", "language", "quality", "personal", "exact", "near", "lines")
"""Steps that need no file of the user."""
