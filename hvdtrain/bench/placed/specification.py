"""What the starter tells a rank, and how the rank's answer is found again."""

from __future__ import annotations

import base64
import json
from typing import Any

# In front of the result where it goes through standard output, which is shared with whatever else is printed.
MARK = "hvdtrain-bench-result:"


def encode(specification: dict[str, Any]) -> str:
    """One word that no shell changes."""
    return base64.urlsafe_b64encode(json.dumps(specification).encode()).decode()


def decode(word: str) -> dict[str, Any]:
    """The inverse."""
    specification: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word))
    return specification
