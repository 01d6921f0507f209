"""`hvdtrain exec`: runs an unchanged Horovod script on this package, or on the real Horovod."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.hvd import alias
from hvdtrain.hvd.engine import meet
from hvdtrain.launch.detect import detect


def run(backend: str, target: str, arguments: Sequence[str], module: bool, prepare_real: Callable[[], None]) -> None:
    """Run a script as `python SCRIPT` or `python -m MODULE` would.

    Args:
        backend: "ddp" for this package under the name horovod, "horovod" for the real one.
        target: path of the script, or name of the module.
        arguments: what the script finds in sys.argv[1:].
        module: whether target is a module.
        prepare_real: called before a script that is to find the real Horovod.

    Raises:
        UserError: there is no such script or module, the real Horovod is not installed, or the job is started by
            horovodrun's elastic mode.
        SystemExit: the script's.
    """
    if module:
        if importlib.util.find_spec(target.partition(".")[0]) is None:
            raise UserError(f"exec -m {target}: no module of this name is installed or in the current folder")
    elif not Path(target).exists():
        raise UserError(f"exec {target}: no such file in {Path.cwd()}")
    if backend == "ddp":
        _prepare_own()
    elif importlib.util.find_spec("horovod") is None:
        raise UserError(
            "exec --backend horovod: Horovod is not installed; `hvdtrain build-horovod` builds it, or use --backend ddp"
        )
    else:
        prepare_real()
    sys.argv = [target, *arguments]
    if module:
        # As python -m does; runpy puts the module's file into argv[0].
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def _prepare_own() -> None:
    if os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise UserError(
            "exec --backend ddp does not work under horovodrun's elastic mode (--min-np, --host-discovery-script): "
            "start it with `torchrun --nnodes MIN:MAX --max-restarts N ... -m hvdtrain exec SCRIPT`, whose agent "
            "restarts the ranks; hvd.elastic.run then continues from the last commit"
        )
    export_place()
    alias.install()
    alias.export_to_children()


def export_place() -> None:
    """Set HOROVOD_RANK and its kin, which scripts read, where another launcher than horovodrun started this process."""
    detected = detect(os.environ)
    meet.detected = detected
    if detected.launcher in ("none", "horovodrun", "mpirun", "mvapich2", "hydra"):
        # Either it did so already, or a Horovod script finds the launcher's own variables.
        return
    values = {
        "HOROVOD_RANK": detected.rank,
        "HOROVOD_SIZE": detected.size,
        "HOROVOD_LOCAL_RANK": detected.local_rank,
        "HOROVOD_LOCAL_SIZE": detected.local_size,
        "HOROVOD_CROSS_RANK": detected.node_rank,
        "HOROVOD_CROSS_SIZE": detected.num_nodes,
    }
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
