"""The reference of all keys, made from the models themselves."""

from __future__ import annotations

import dataclasses

import pydantic
from pydantic_core import PydanticUndefined

from hvdtrain.config import schema, source
from hvdtrain.config.models import Config


@dataclasses.dataclass(frozen=True)
class KeyDoc:
    """One key of the job file: its name with dots, what it accepts, its default as YAML (None: required)."""

    key: str
    accepts: str
    default: str | None
    text: str


def describe_keys() -> list[KeyDoc]:
    """Every key, outer ones before the ones they hold."""
    docs = []
    for path, field in schema.walk(Config, ()):
        value = field.default
        if isinstance(value, pydantic.BaseModel):
            value = value.model_dump()
        default = None if value is PydanticUndefined else source.dump_short(value)
        docs.append(KeyDoc(".".join(path), schema.in_words(field), default, field.description or ""))
    return docs
