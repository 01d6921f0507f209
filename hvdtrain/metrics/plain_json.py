"""JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON text; NaN and the infinities become null, because JSON has no such numbers."""
    try:
        return json.dumps(document, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
