"""What of the caller's environment travels to the ranks.

Values go through the agent's standard input, never through a command line: any bytes arrive as they are, and nobody
reads them in `ps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hvdtrain.errors import LaunchError

# Where programs and libraries are found, and what tunes the libraries of a training job.
NAMES = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TZ", "LANG", "LC_ALL"})
PREFIXES = (
    "HVDTRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "CUDA_", "OPENBLAS_",
    "TENSORBOARD_", "PYTHON",
)  # fmt: skip
# What another launcher said about this process: it must not reach the ranks.
_OF_A_LAUNCHER = re.compile(
    r"^(HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|GLOO_.*|CONTROLLER|CPU_OPERATIONS)"
    r"|TORCHELASTIC_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT))$"
)
# What holds on this machine alone.
_OF_THIS_HOST = re.compile(r"^(HVDTRAIN_SSH_.*|CUDA_VISIBLE_DEVICES)$")
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def select(environ: Mapping[str, str], asked: Iterable[str] = ()) -> dict[str, str]:
    """The variables that every rank gets.

    Args:
        environ: the caller's environment.
        asked: `-x` options: NAME (the caller's value) or NAME=VALUE; they win over everything.

    Raises:
        LaunchError: a name asked for is not a name, or is not set here.
    """
    chosen = {
        name: value
        for name, value in of_this_host(environ).items()
        if (name in NAMES or name.startswith(PREFIXES)) and not _OF_THIS_HOST.match(name)
    }
    for word in asked:
        name, given, value = word.partition("=")
        if not _NAME.match(name):
            raise LaunchError(f"-x {word}: {name!r} is not the name of a variable; write -x NAME or -x NAME=VALUE")
        if not given:
            if name not in environ:
                raise LaunchError(f"-x {name}: it is not set here; write -x {name}=VALUE")
            value = environ[name]
        chosen[name] = value
    return chosen


def of_this_host(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on the caller's own host get: everything but other launchers' variables and shell functions."""
    return {
        name: value
        for name, value in environ.items()
        if not _OF_A_LAUNCHER.match(name) and not is_function(name, value)
    }


def is_function(name: str, value: str) -> bool:
    """Whether bash would import this as a shell function: code that must not run on other hosts unasked."""
    return not _NAME.match(name) or value.startswith("() {")
