"""Frozen values that are made by the million: structs that `dataclasses` takes as its own.

Making a frozen dataclass takes a call for each of its fields, and a decision needs a dozen of them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, ClassVar, cast

import msgspec

Fields = dict[str, dataclasses.Field[Any]]


class Value(msgspec.Struct, frozen=True):
    """Compared, hashed and shown by its fields; `dataclasses.replace`, `fields` and `asdict` work.

    Subclasses say `frozen=True` too and declare fields as msgspec's structs do; types are not
    checked when one is made.
    """

    __dataclass_fields__: ClassVar[Fields]


class _FieldsOf:
    """What `dataclasses` looks for in a class, made when somebody asks."""

    def __get__(self, value: object, kind: type[Value]) -> Fields:
        return _fields(kind)


@cache
def _fields(kind: type[Value]) -> Fields:
    twin = dataclasses.make_dataclass(kind.__name__, kind.__struct_fields__)
    return cast(Any, twin).__dataclass_fields__  # type: ignore[no-any-return]


Value.__dataclass_fields__ = cast(Any, _FieldsOf())
