"""Reads YAML with the scalars of version 1.2, and says where a text is no YAML."""

from __future__ import annotations

import re
from typing import Any

import yaml

from raymega.errors import one_line

MOST_VALUES = 100_000
"""Most values of a text, those that aliases repeat included: ten lines of aliases of aliases make billions."""
MOST_SHOWN = 60
"""Most characters of a faulty line that a message repeats."""


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars: 3e-4 is a number; on, off, yes, no and 2026-11-30 are strings.

    Sequences become tuples, as the strict fields of a job require.
    """

    # YAML 1.1's patterns for these types are dropped; 1.2's are added below the class.
    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own form
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith((":bool", ":float", ":int", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> yaml.Node | None:
        """Return the text's one node, unless its aliases repeat too many values."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _num_values(node, {}) > MOST_VALUES:
            problem = f"its values and aliases make more than {MOST_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Refuse a duplicate key, of which PyYAML would silently take the last."""
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]!r} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)

    def construct_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        """Return a sequence as a tuple."""
        # deep: otherwise PyYAML fills inner lists only after the tuple is made.
        return tuple(self.construct_sequence(node, deep=True))

    def refuse_tag(self, node: yaml.Node) -> object:
        """Raise for an explicit ``!!timestamp``, a tag that YAML 1.2 does not have."""
        return self.construct_undefined(node)


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values below a node, each as often as aliases repeat it; ``known`` has those of nodes so far."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # a node that holds itself is refused later
        is_mapping = isinstance(node, yaml.MappingNode)
        inner = [each for pair in node.value for each in pair] if is_mapping else node.value
        known[id(node)] = 1 + sum(_num_values(each, known) for each in inner)
    return known[id(node)]


_Yaml12Loader.add_constructor("tag:yaml.org,2002:seq", _Yaml12Loader.construct_tuple)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:timestamp", _Yaml12Loader.refuse_tag)

# Scalars of YAML 1.2's core schema; the list has the first characters that each pattern can have.
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789")
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"
    ),
    list("-+0123456789."),
)


def read_yaml(text: str) -> Any:
    """Parse YAML with scalars of version 1.2, tuples for sequences, and without duplicate keys.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Yaml12Loader)
    except (ValueError, LookupError, RecursionError) as error:
        # PyYAML raises these for explicit tags with a bad value (!!int x) and for endless nesting.
        raise yaml.YAMLError(str(error)) from error


def yaml_fault(error: yaml.YAMLError | UnicodeDecodeError) -> tuple[str, str]:
    """Return where and why a text is no YAML, on one line, and the remedy.

    Args:
        error: Error of :func:`read_yaml`, or of decoding the text.
    """
    if isinstance(error, UnicodeDecodeError):
        at = f"byte {error.start} ({error.object[error.start]:#04x}) is no UTF-8 text"
        return at, "give a text file; a job is written in an editor"
    if isinstance(error, yaml.reader.ReaderError):
        at = f"character {error.position + 1} (U+{error.character:04X}) is none that YAML has"
        return at, "remove it, or write it as an escape in quotes"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error), "correct the value"
    # PyYAML draws a caret below the line; in one line the column says the same
    mark, opened = error.problem_mark, error.context_mark
    cause = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if shown := _line_at(mark):
        cause += f" in `{shown}`"
    remedy = f"correct line {mark.line + 1}"
    if "'\\t'" in str(error.problem):
        remedy = "indent with spaces, YAML allows no tabs there"
    elif "aliases make" in str(error.problem):
        remedy = "write fewer values, without aliases (*name) of aliases"
    elif "stands twice" in str(error.problem):
        remedy = "remove one of the two lines"
    elif opened is not None and opened.line < mark.line:
        remedy = f"close what line {opened.line + 1} opens: `{_line_at(opened)}`"
    return cause, remedy


def _line_at(mark: yaml.Mark) -> str:
    """Return the line of a mark, without what surrounds it."""
    lines = (mark.buffer or "").rstrip("\0").splitlines()
    return lines[mark.line].strip()[:MOST_SHOWN] if mark.line < len(lines) else ""
