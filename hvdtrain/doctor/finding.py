"""What one check found."""

from __future__ import annotations

import dataclasses
import enum


class Status(str, enum.Enum):
    """How bad it is: FAULT alone makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAULT = "fault"
    # Not here, and not needed: no fault.
    ABSENT = "absent"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A row of the table.

    Attributes:
        status: see `Status`.
        subject: what was looked at, at most 16 characters.
        found: what is there.
        cure: what to do, with the exact command where there is one; empty if there is nothing to do.
    """

    status: Status
    subject: str
    found: str
    cure: str = ""


def ok(subject: str, found: str) -> Finding:
    """It is there and works."""
    return Finding(Status.OK, subject, found)


def warn(subject: str, found: str, cure: str) -> Finding:
    """It works, and will be slow or fail in some uses."""
    return Finding(Status.WARN, subject, found, cure)


def fault(subject: str, found: str, cure: str) -> Finding:
    """It is needed, or was asked for, and does not work."""
    return Finding(Status.FAULT, subject, found, cure)


def absent(subject: str, found: str, cure: str = "") -> Finding:
    """It is optional and not here."""
    return Finding(Status.ABSENT, subject, found, cure)
