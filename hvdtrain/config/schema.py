"""The tree of keys as data: what each accepts, in words; used by the error messages and by the reference."""

from __future__ import annotations

import types
import typing
from typing import Any

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from hvdtrain.config.models import Config


def section_of(field: FieldInfo) -> type[pydantic.BaseModel] | None:
    """The model of a field that holds keys of its own."""
    for part in _parts(field.annotation):
        if isinstance(part, type) and issubclass(part, pydantic.BaseModel):
            return part
    return None


def field_at(path: tuple[str, ...]) -> FieldInfo | None:
    """The field that `path` names, or None."""
    model: type[pydantic.BaseModel] | None = Config
    field: FieldInfo | None = None
    for name in path:
        field = model.model_fields.get(name) if model else None
        if field is None:
            return None
        model = section_of(field)
    return field


def all_keys() -> list[str]:
    """Every key with dots, outer ones before the ones they hold."""
    return [".".join(path) for path, _ in walk(Config, ())]


def walk(model: type[pydantic.BaseModel], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], FieldInfo]]:
    """Every field beneath `model` with its path."""
    found = []
    for name, field in model.model_fields.items():
        found.append(((*path, name), field))
        if section := section_of(field):
            found += walk(section, (*path, name))
    return found


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that the field accepts; none when it is not a choice of words."""
    return tuple(word for part in _parts(field.annotation) for word in typing.get_args(part) if _is_literal(part))


def in_words(field: FieldInfo) -> str:
    """What the field accepts: "a whole number of at least 1, or null"."""
    words = []
    for part in _parts(field.annotation):
        bound = _bound([*field.metadata, *_metadata(field.annotation)])
        if _is_literal(part):
            words.append("one of " + ", ".join(typing.get_args(part)))
        elif part is bool:
            words.append("true or false")
        elif part is int:
            words.append("a whole number" + bound)
        elif part is float:
            words.append("a number" + bound)
        elif part is str:
            words.append("text")
        elif part is types.NoneType:
            words.append("null")
        else:
            words.append("a mapping")
    return ", or ".join(words)


def _parts(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in _parts(member)]
    if typing.get_origin(annotation) is typing.Annotated:
        return _parts(typing.get_args(annotation)[0])
    return [annotation]


def _metadata(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [item for member in typing.get_args(annotation) for item in _metadata(member)]
    if typing.get_origin(annotation) is typing.Annotated:
        _, *rest = typing.get_args(annotation)
        return [item for extra in rest for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    return []


def _bound(metadata: list[Any]) -> str:
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            return f" of at least {item.ge}"
        if isinstance(item, annotated_types.Gt):
            return f" above {item.gt}"
    return ""


def _is_literal(part: Any) -> bool:
    return typing.get_origin(part) is typing.Literal
