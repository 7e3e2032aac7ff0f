"""Base class of the job file's sections, and the types of numbers in their fields."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

MOST = 2**63 - 1
"""Largest whole number: int64, as in tensors and files."""

Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PLUGIN_NAME = r"^[a-z]\w*\.\w+$"
PluginName = Annotated[str, Field(pattern=PLUGIN_NAME)]
"""Name of a part from one of the modules in ``plugins``, such as ``acme.triangle``."""
Decay = Annotated[float, Field(ge=0, lt=1)]


def by_path(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted path."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        found |= by_path(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


class Section(BaseModel):
    """Base of every section: frozen, strict scalars, no unknown keys.

    The text below a field is its description, in the JSON schema and in errors.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def describe(cls, field: str) -> str:
        """Return the description of a field."""
        return cls.model_fields[field].description or _texts_below(cls).get(field, "")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """Return the section's JSON schema with the descriptions of its fields."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        for name, field in handler.resolve_ref_schema(schema)["properties"].items():
            if text := cls.describe(name):
                field["description"] = text
        return schema


@cache
def _texts_below(section: type[Section]) -> dict[str, str]:
    """Return the text below each field of a section, in one line.

    It is read from the source when somebody asks. pydantic's own ``use_attribute_docstrings`` reads it
    in every process that imports the section, for 20 ms.
    """
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef), "a section is a class"
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field; None for a field that is not a section."""
    return as_section(field.annotation)


def as_section(kind: object) -> type[Section] | None:
    """Return a type if it is a section class, else None."""
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
