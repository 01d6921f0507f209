"""Rates of links as `tc` spells them."""

from __future__ import annotations

import re

from hvdtrain.errors import LaunchError

# tc's units are powers of 1000 (see tc(8), PARAMETERS, RATES).
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SPELLING = re.compile(r"^(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)$")


def parse_rate(text: str) -> float:
    """Bits per second from `1gbit`, `100mbit`, `2.5Gbit`.

    Raises:
        LaunchError: another spelling, or a rate of zero.
    """
    match = _SPELLING.match(text.strip().lower())
    if match is None or match["unit"] not in _UNITS or float(match["number"]) == 0:
        raise LaunchError(f"{text!r} is not a rate; write it as 1gbit, 100mbit or 2.5gbit (bits per second)")
    return float(match["number"]) * _UNITS[match["unit"]]


def format_rate(bits_per_s: float) -> str:
    """For people: `1 Gbit/s`, `100 Mbit/s`."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"
