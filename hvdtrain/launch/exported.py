"""The environment variables that a connection sets, and gives back when it closes.

Libraries and child processes are told through the environment (which interface, how many threads, Horovod's settings).
What was set for one connection must not answer for the next one in the same process, nor for a job that the process
starts afterwards: a loopback interface left over from a connection of one rank would be every later job's.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hvdtrain.launch.cores import GIVEN_UP_VARIABLE
from hvdtrain.launch.current import PLACE_VARIABLE
from hvdtrain.launch.network import INTERFACE_VARIABLES

_NAMES = frozenset((*INTERFACE_VARIABLES, PLACE_VARIABLE, GIVEN_UP_VARIABLE, "OMP_NUM_THREADS"))


def now(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of them that are set now, with their values: to be taken before a connection, for `give_back`."""
    return {name: value for name, value in environ.items() if name in _NAMES or name.startswith("HOROVOD_")}


def give_back(before: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Make them what they were when `now` was asked; all other variables stay."""
    for name in now(environ):
        if name not in before:
            del environ[name]
    environ.update(before)
