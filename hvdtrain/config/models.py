"""The keys of a job file: types, defaults and what each is for. `python -m hvdtrain.config` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from hvdtrain.config import source
from hvdtrain.config.paths import find_task_file
from hvdtrain.config.problems import Origins
from hvdtrain.errors import ConfigError

BackendName = Literal["ddp", "horovod"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]
Precision = Literal["fp32", "bf16", "fp16"]
DeviceName = Literal["auto", "cpu", "cuda"]
Transport = Literal["auto", "gloo", "nccl", "mpi"]
UnevenData = Literal["fill", "stop"]
Scaling = Literal["none", "linear", "sqrt"]
Schedule = Literal["constant", "cosine", "linear"]
Mode = Literal["max", "min"]

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]

TASK_PATTERN = r"^(?P<source>.+):(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)$"


class _Section(pydantic.BaseModel):
    # Strict: true is not 1 and '0.05' is not 0.05; a slip must not become a value.
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class OptimizerConfig(_Section):
    """Which optimizer, with its options under torch's own names."""

    model_config = pydantic.ConfigDict(extra="allow")

    name: str = Field(default="SGD", description="Any class of torch.optim. Not used when the task has optimizer().")
    lr: PositiveOrZero | None = Field(
        default=0.05,
        description="Learning rate before scaling and warm-up; null: torch's default.",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_optimizer(cls, given: Any) -> Any:
        # Without a name it is the default optimizer with some options changed; with a name, an option that is not
        # given has torch's default, so that no momentum of ours reaches a named SGD.
        if isinstance(given, dict):
            return {**({"lr": None} if "name" in given else DEFAULT_OPTIMIZER), **given}
        return given

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the optimizer class: everything that was given but the name."""
        options = {key: value for key, value in self.model_dump().items() if key != "name"}
        if options["lr"] is None:
            del options["lr"]
        return options


DEFAULT_OPTIMIZER = {"name": "SGD", "lr": 0.05, "momentum": 0.9}


class LrConfig(_Section):
    """How the learning rate follows the batch and the steps."""

    scaling: Scaling = Field(
        default="none",
        description="Multiply the learning rate by (effective batch / base_batch), or by its square root. "
        "Effective batch: batch_size x accumulate x number of ranks. Never applied unasked.",
    )
    base_batch: Count = Field(default=64, description="Effective batch for which optimizer.lr is meant, samples.")
    warmup_steps: CountOrZero = Field(
        default=0,
        description="Steps over which the learning rate rises linearly to its value.",
    )
    schedule: Schedule = Field(
        default="constant",
        description="After the warm-up: constant, or falling to zero at the last step (cosine, linear). "
        "Not used when the task has scheduler().",
    )


class EvalConfig(_Section):
    """When to evaluate."""

    every_epochs: Count | None = Field(default=1, description="Epochs between evaluations; null: at the end only.")


class BestConfig(_Section):
    """Which checkpoint is the best one."""

    metric: str = Field(description="Name of a value that the task's metrics() returns.")
    mode: Mode = Field(description="Whether the largest or the smallest value is the best.")


class CheckpointConfig(_Section):
    """When to save and what to keep."""

    every_steps: Count | None = Field(default=500, description="Steps between checkpoints; null: at the end only.")
    keep: Count | None = Field(default=3, description="Newest checkpoints to keep; null: all of them.")
    best: BestConfig | None = Field(
        default=None, description="Keep the best one by a metric too: {metric: accuracy, mode: max}; null: do not."
    )


class Config(_Section):
    """A job: everything that a job file can say, with every default filled in.

    Made by `load_config`; or in Python with keyword arguments, which raises pydantic's ValidationError.
    """

    task: str = Field(
        pattern=TASK_PATTERN,
        description="What to train: path/to/file.py:Class or package.module:Class. A relative path is looked for in "
        "the working directory, then in the job file's folder and in the folders above that.",
    )
    task_options: dict[str, Any] = Field(default={}, description="Keyword arguments of the task's class.")
    backend: BackendName = Field(default="ddp", description="What keeps the ranks' models equal.")
    compression: Compression = Field(
        default="none", description="What gradients are cast to on the wire. bf16 and powersgd: ddp only."
    )
    precision: Precision = Field(default="fp32", description="Autocast to bf16, or to fp16 with a loss scaler.")
    loss_scale: Positive = Field(default=65536.0, description="Initial scale of the loss with precision fp16.")
    device: DeviceName = Field(default="auto", description="auto: cuda where torch has it, else cpu.")
    transport: Transport = Field(default="auto", description="What carries the bytes. auto: nccl on cuda, else gloo.")
    epochs: Count | None = Field(
        default=3,
        description="Passes over the data; null: no limit (then give max_steps). The first limit ends it.",
    )
    max_steps: Count | None = Field(default=None, description="Optimizer steps; null: no limit.")
    batch_size: Count | None = Field(
        default=64, description="Samples of one microbatch on one rank; null: each item of the dataset is a microbatch."
    )
    accumulate: Count = Field(default=1, description="Microbatches per optimizer step.")
    sync_every_microbatch: bool = Field(
        default=False, description="Reduce gradients after every microbatch and not only after the last of a step."
    )
    shuffle: bool = Field(default=True, description="false: sample i goes to rank i mod size, in order.")
    clip_norm: Positive | None = Field(
        default=None,
        description="Largest norm of the averaged gradient; null: do not clip.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig.model_validate({}),
        description="{name: any torch.optim class, lr, and its other options}. With a name, options that are not given "
        "have torch's defaults.",
    )
    lr: LrConfig = Field(default=LrConfig(), description="Scaling, warm-up and schedule of optimizer.lr.")
    seed: CountOrZero = Field(default=1, description="Of the initial weights, the order of the data and the workers.")
    num_workers: CountOrZero = Field(
        default=0,
        description="Data-loader processes per rank; 0: load in the rank itself.",
    )
    uneven_data: UnevenData = Field(
        default="fill",
        description="When ranks have different amounts of data: fill: go on until the last one is done, ranks without "
        "data weigh nothing; stop: end the epoch when the first one is done.",
    )
    eval: EvalConfig = Field(default=EvalConfig(), description="When to evaluate.")
    find_unused_parameters: bool = Field(
        default=False, description="ddp: cope with parameters that get no gradient in a step (Horovod always does)."
    )
    static_graph: bool = Field(default=False, description="ddp: promise that every step uses the same parameters.")
    bucket_mb: Positive = Field(default=25.0, description="ddp: gradients are reduced in buckets of this size, MiB.")
    compile: bool = Field(default=False, description="Run the model through torch.compile.")
    stall_warning_s: Positive = Field(default=60.0, description="Report a collective that has waited so long, seconds.")
    stall_abort_s: Positive = Field(
        default=600.0,
        description="End the job when a collective has waited so long, seconds.",
    )
    start_timeout_s: Positive = Field(
        default=300.0,
        description="Longest wait for all ranks to find each other, seconds.",
    )
    network_interface: str = Field(
        default="auto",
        min_length=1,
        description="Interface for the traffic between hosts, such as eth0; auto: the one that reaches the root.",
    )
    log_every_steps: Count = Field(
        default=10,
        description="Steps between lines of metrics.jsonl and the progress display.",
    )
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="When to save and what to keep.")
    output: str = Field(
        default="runs/job",
        min_length=1,
        description="Folder of the results, made if it is missing. Default: runs/ and the job file's name without "
        ".yaml.",
    )

    _origins: Origins = pydantic.PrivateAttr(default_factory=Origins)

    def __eq__(self, other: object) -> bool:
        # Pydantic would compare the private attributes too: the same job from another file is the same job.
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """All keys with their values, as plain Python types; `load_config` reads the YAML of it as an equal Config."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """The text of `config.yaml`."""
        return source.dump(self.to_dict())

    def dump_yaml(self, path: str | Path) -> None:
        """Write `config.yaml`: every key as resolved. Not collective; only the root should call it."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @property
    def task_source(self) -> str:
        """The part of `task` before the last colon: a file or a module."""
        return self.task.rpartition(":")[0]

    @property
    def task_name(self) -> str:
        """The part of `task` after the last colon: the class."""
        return self.task.rpartition(":")[2]

    def task_file(self) -> Path | None:
        """The file that `task` names, absolute; None when it names a module.

        Raises:
            ConfigError: there is no such file; says where it was looked for.
        """
        try:
            return find_task_file(self.task_source, self._origins.file)
        except FileNotFoundError as error:
            raise self.error("task", str(error)) from None

    def error(self, key: str, text: str) -> ConfigError:
        """An error about the value of `key` ("optimizer.momentum") that says where it was written.

        For faults that only show once the job runs, such as an option that the optimizer does not have.
        """
        return ConfigError(str(self._origins.problem(tuple(key.split(".")), text)))
