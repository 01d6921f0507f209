"""ResNet on CIFAR-10 or synthetic images, started by any launcher, with the options of the published recipe.

    torchrun --standalone --nproc_per_node=2 main.py --backend=gloo --use_syn --batch_size=8 --arch=resnet18

It turns the options into a job (cifar10.yaml or synthetic.yaml in this folder, some keys changed) and gives that to the
trainer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.backends import make_backend
from hvdtrain.config import Config, load_config
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import ManualFlags
from hvdtrain.trainer import connect_options, train_on

FOLDER = Path(__file__).resolve().parent
# --backend: (backend, transport). The published recipe calls the transport of DDP its backend.
BACKENDS = {
    "nccl": ("ddp", "nccl"),
    "gloo": ("ddp", "gloo"),
    "mpi": ("ddp", "mpi"),
    "ddp": ("ddp", "auto"),
    "horovod": ("horovod", "auto"),
}
ARCHS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--backend",
        choices=list(BACKENDS),
        default="ddp",
        help="ddp: DDP over nccl on GPUs, else over gloo (default); nccl, gloo, mpi: DDP over that; horovod",
    )
    add("--arch", choices=ARCHS, default="resnet50", help="default: resnet50")
    add("--batch_size", type=int, default=256, help="images of one process in a step (default: 256)")
    add("--num_epochs", type=int, default=100, help="default: 100")
    add("--learning_rate", type=float, help="default: the job file's")
    add("--random_seed", type=int, default=0, help="default: 0")
    add("--use_syn", action="store_true", help="random images; no files are read")
    add("--steps_syn", type=int, default=20, help="with --use_syn: steps of an epoch (default: 20)")
    add("--image_size", type=int, default=32, help="with --use_syn: height and width, a multiple of 8 (default: 32)")
    add("--data", default="data", help="folder with CIFAR-10's binary files or with cifar-10-batches-bin in it")
    add("--model_dir", help="folder of the results and checkpoints (default: runs/resnet-N, a new one for each run)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --model_dir")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="as for `hvdtrain train`")
    add("--local_rank", "--local-rank", type=int, help="what torch.distributed.launch passes")
    chosen = parser.parse_args(arguments)
    if chosen.resume and chosen.model_dir is None:
        parser.error("--resume needs --model_dir: the folder of the run that is to be continued")
    return chosen


def job(chosen: argparse.Namespace) -> Config:
    """The job file with what the options change."""
    backend, transport = BACKENDS[chosen.backend]
    overrides = [
        f"transport={transport}",
        f"task_options.arch={chosen.arch}",
        f"batch_size={chosen.batch_size}",
        f"epochs={chosen.num_epochs}",
        f"seed={chosen.random_seed}",
    ]
    if chosen.learning_rate is not None:
        overrides.append(f"optimizer.lr={chosen.learning_rate}")
    if chosen.use_syn:
        overrides.append(f"task_options.synthetic_samples={chosen.steps_syn * chosen.batch_size}")
        overrides.append(f"task_options.image_size={chosen.image_size}")
    else:
        overrides.append(f"task_options.data={chosen.data}")
    file = FOLDER / ("synthetic.yaml" if chosen.use_syn else "cifar10.yaml")
    return load_config(file, [*overrides, *chosen.overrides], backend=backend, output=chosen.model_dir)


class EpochLines:
    """Prints what the recipe's users look for: a line per rank as an epoch starts, the time of a step as it ends."""

    def __init__(self, local_rank: int, *, is_root: bool) -> None:
        self._local_rank, self._is_root = local_rank, is_root
        self._epoch_s: list[float] = []

    def epoch_started(self, epoch: int) -> None:
        _say(f"Local Rank: {self._local_rank}, Epoch: {epoch}, Training ...")

    def epoch_ended(self, epoch: int, num_steps: int, seconds: float) -> None:
        self._epoch_s.append(seconds)
        if self._is_root:
            _say(f"num_steps_per_gpu: {num_steps}, avg_step_time: {seconds / num_steps:.4f}")

    def end(self) -> None:
        """The average of the epochs after the first, which warms up; of the first where there is no other."""
        counted = self._epoch_s[1:] or self._epoch_s
        if self._is_root and counted:
            _say(f"Average epoch time: {sum(counted) / len(counted):.4f}")


def _say(text: str) -> None:
    # On a terminal rank 0's progress line may stand there; it is drawn again below. mpirun makes stdout alone one.
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if on_terminal else text, flush=True)


def _free_folder() -> str:
    number = 1
    while Path(f"runs/resnet-{number}").exists():
        number += 1
    return f"runs/resnet-{number}"


def main() -> int:
    """One rank. Returns the exit status, as `hvdtrain train` does."""
    chosen = options()
    config = job(chosen)
    flags = ManualFlags(local_rank=chosen.local_rank) if chosen.local_rank is not None else None
    with make_backend(config.backend, connect_options(config, flags)) as backend:
        if chosen.model_dir is None:
            config = config.model_copy(update={"output": backend.broadcast_object(_free_folder())})
        lines = EpochLines(backend.world.local_rank, is_root=backend.world.is_root)
        status = train_on(backend, config, resume="auto" if chosen.resume else "none", watch=lines)
        lines.end()
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HvdtrainError as error:
        print(f"main.py: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
