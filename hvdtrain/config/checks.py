"""Combinations of keys that cannot work, each right on its own."""

from __future__ import annotations

from collections.abc import Collection

from hvdtrain.config.models import Config
from hvdtrain.config.problems import Origins, Problem


def check_together(config: Config, origins: Origins, ignore: Collection[str] = ()) -> list[Problem]:
    """What does not fit together, reported at the key that has to change.

    Args:
        ignore: outermost keys whose values are not known; combinations with them are not looked at.
    """
    problems: list[Problem] = []

    def check(wrong: bool, keys: tuple[str, ...], text: str) -> None:
        if wrong and not any(key in ignore for key in keys):
            problems.append(origins.problem(tuple(keys[0].split(".")), text))

    # Horovod 0.28.1 raises on torch.bfloat16: its data types end at float64 and bool.
    check(
        config.backend == "horovod" and config.compression == "bf16",
        ("compression", "backend"),
        "bf16 cannot be used with the horovod backend: Horovod 0.28.1 has no bfloat16; use fp16 or none, "
        "or the ddp backend",
    )
    check(
        config.backend == "horovod" and config.compression == "powersgd",
        ("compression", "backend"),
        "powersgd cannot be used with the horovod backend: Horovod 0.28.1 reduces each gradient as it is and has no "
        "hook for it; use fp16 or none, or the ddp backend",
    )
    check(
        config.epochs is None and config.max_steps is None,
        ("epochs", "max_steps"),
        "epochs and max_steps are both null, so the run would never end; give one of them",
    )
    check(
        config.device == "cpu" and config.transport == "nccl",
        ("transport", "device"),
        "nccl carries CUDA tensors only, and device is cpu; use transport gloo, or device cuda",
    )
    check(
        config.lr.scaling != "none" and config.batch_size is None,
        ("lr", "batch_size"),
        f"scaling {config.lr.scaling} needs a batch size, and batch_size is null; use scaling none",
    )
    return problems
