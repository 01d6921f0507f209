"""What two configurations do not share; printed when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Compare two results of `Config.to_dict()`.

    Returns:
        (key, value before, value now) for each key that differs, in the order of the keys of `before`, nested ones
        with dots. A key that one side lacks has None there.
    """
    found: list[tuple[str, Any, Any]] = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [(f"{key}.{inner}", was, is_now) for inner, was, is_now in differences(old, new)]
        elif old != new or type(old) is not type(new):
            found.append((key, old, new))
    return found
