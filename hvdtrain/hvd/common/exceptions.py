"""The exceptions of Horovod's API; the names and base classes are what scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed, or the ranks disagree about it; elastic training recovers from this one."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts of an elastic job has changed.

    Args:
        skip_sync: hosts were only removed, so that the state of the others needs no new synchronisation.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(f"the hosts of this job have changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The installed framework is not the one Horovod was built for (never raised here: nothing is built)."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {installed_version} is installed, {version} was expected")
        self.name = name
        self.version = version
        self.installed_version = installed_version
