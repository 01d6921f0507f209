"""A whole job on one rank: connect, build, resume, train, evaluate, save, report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.backends import Backend, ConnectOptions, Replica, make_backend
from hvdtrain.checkpoint import BestRule, CheckpointStore
from hvdtrain.config import Config
from hvdtrain.data.feed import Feed
from hvdtrain.data.order import derived_seed
from hvdtrain.data.seeding import seed_all
from hvdtrain.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, TrainingFailed
from hvdtrain.failure import Failure
from hvdtrain.launch import ManualFlags
from hvdtrain.metrics import Summary, clear_summary, end_report, parameters_sha256, set_up_logging, write_summary
from hvdtrain.precision import Precision
from hvdtrain.profiling import Profile, Profiled
from hvdtrain.task import load_task
from hvdtrain.trainer.epoch_watch import EpochWatch
from hvdtrain.trainer.evaluation import Evaluation
from hvdtrain.trainer.length import RunLength
from hvdtrain.trainer.loop import Loop, vote
from hvdtrain.trainer.optimizer import make_optimizer
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.saving import Saving, on_root
from hvdtrain.trainer.schedule import Schedule, scale_learning_rate
from hvdtrain.trainer.session import Session
from hvdtrain.trainer.show import Show

logger = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    resume: str = "none",
    flags: ManualFlags | None = None,
    hvd: ModuleType | None = None,
    profile: bool = False,
) -> int:
    """Train the job on this rank, together with the other ranks of the launcher. Collective over all of them.

    Args:
        resume: none | auto | the path of a checkpoint.
        flags: ranks and addresses given by hand.
        hvd: for backend horovod, a module with Horovod's API to use in its place.
        profile: tell where the time of a step goes, and leave a trace of some steps for each rank.

    Returns:
        The exit status: 0 done, 75 stopped on request with a checkpoint saved.

    Raises:
        UserError: the input is wrong (alone; with other ranks, the process ends with status 2).
        TrainingFailed: the job failed (alone; with other ranks, the process ends with status 1).
    """
    options = dataclasses.replace(connect_options(config, flags), timeline=profile)
    with make_backend(config.backend, options, hvd) as backend:
        return train_on(backend, config, resume=resume, profile=profile)


def train_on(
    backend: Backend,
    config: Config,
    *,
    resume: str = "none",
    watch: EpochWatch | None = None,
    profile: bool = False,
) -> int:
    """Train the job over a connection that is there already, which stays open. Collective. As `train`.

    Args:
        watch: is told of every epoch, on every rank.
    """
    return Job(config, backend, watch, profile=profile).run(resume)


def connect_options(config: Config, flags: ManualFlags | None = None) -> ConnectOptions:
    """The configuration's part that is about connecting."""
    return ConnectOptions(
        device=config.device,
        transport=config.transport,
        network_interface=config.network_interface,
        start_timeout_s=config.start_timeout_s,
        stall_warning_s=config.stall_warning_s,
        stall_abort_s=config.stall_abort_s,
        flags=flags,
        groups=False,
        handle_signals=True,
    )


@dataclasses.dataclass
class Prepared:
    """A job that is ready to take its first step."""

    session: Session
    show: Show
    replica: Replica
    precision: Precision
    store: CheckpointStore | None
    profile: Profile | None


class Job:
    """One job on one rank, over a started backend."""

    def __init__(
        self, config: Config, backend: Backend, watch: EpochWatch | None = None, *, profile: bool = False
    ) -> None:
        self._config, self._backend, self._watch = config, backend, watch
        self._profiles = profile
        self._output = Path(config.output)
        self._position = Position()
        self._is_root = backend.world.is_root
        self._started = False
        backend.on_failure(self._write_failure)

    def run(self, resume: str) -> int:
        with contextlib.ExitStack() as stack:
            prepared = self.prepare(resume, stack)
            stopped = prepared.session.run()
            profiled = None if prepared.profile is None else prepared.profile.finish()
            if profiled is not None:
                prepared.show.profiled(profiled)
        return self._report(prepared, stopped, profiled)

    def prepare(self, resume: str, stack: contextlib.ExitStack) -> Prepared:
        """Build everything up to the first step. Collective. What has to be closed goes on the stack."""
        config, backend = self._config, self._backend
        set_up_logging(backend.world, host=backend.host)
        self._compare_configs()
        best = config.checkpoint.best
        rule = None if best is None else BestRule(best.metric, best.mode)
        # The root looks before anything is built or written: a wrong flag must cost nothing.
        store = on_root(
            backend,
            lambda: CheckpointStore(self._output / "checkpoints", keep=config.checkpoint.keep, best=rule),
        )
        found = on_root(backend, lambda: None if store is None else store.find(resume))
        on_root(backend, self._prepare_output)
        self._started = True

        task = load_task(config)
        seed_all(config.seed)
        model = task.model().to(backend.device)
        optimizer = make_optimizer(task, config, model)
        scale_learning_rate(config, optimizer, backend.world.size)
        replica = backend.wrap(
            model,
            optimizer,
            config.compression,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_mb=config.bucket_mb,
            compile=config.compile,
            sync_every_microbatch=config.sync_every_microbatch,
        )
        replica.broadcast_state()
        on_cuda = backend.device.type == "cuda"
        feed = Feed(task, config, backend.world, vote=lambda ballot: vote(backend, ballot), pin_memory=on_cuda)
        feed.check_lengths(backend.all_gather_object)
        evaluation = Evaluation(task, config, backend)
        if rule is not None and not evaluation.is_possible:
            raise config.error("checkpoint.best", "the task has no eval_dataset() and metrics() to find the best by")
        length = RunLength()
        length.measure(config, feed, self._position)
        schedule = Schedule(task, config, optimizer, length)
        precision = Precision(
            config.precision, backend.device, loss_scale=config.loss_scale, clip_norm=config.clip_norm
        )
        # From here on the ranks' random numbers differ: dropout must not drop the same units everywhere.
        seed_all(derived_seed(config.seed, backend.world.rank, 0))
        profile = Profile(backend, self._output, every_steps=config.log_every_steps) if self._profiles else None
        called = (task, backend, replica, feed) if profile is None else profile.watch(task, backend, replica, feed)
        loop = Loop(called[0], config, called[1], called[2], precision, schedule, self._position)
        saving = Saving(store, config, backend, replica, feed, precision, schedule, length, self._position, loop)
        # Nothing of the user's is built after this: it might draw random numbers.
        resumed = saving.resume(found)
        # Not before the checkpoint is known to fit: a wrong flag leaves the folder's config.yaml as it was.
        on_root(backend, self._write_config)
        self._check_resume(resume, resumed)
        show = stack.enter_context(
            Show(config, backend, self._position, length.total_steps, resumed=resumed, watch=self._watch)
        )
        show.announce(model, schedule)
        if profile is not None:
            profile.plan(self._position.step, length.total_steps)
        session = Session(
            config, backend, replica, called[3], loop, evaluation, saving, precision, self._position,
            show if profile is None else profile.watch_show(show),
        )  # fmt: skip
        return Prepared(session, show, replica, precision, store, profile)

    def _report(self, prepared: Prepared, stopped: bool, profiled: Profiled | None) -> int:
        summary = self._summary("stopped" if stopped else "done", prepared.precision.skipped_steps)
        summary.samples_per_second = prepared.show.samples_per_second
        summary.eval = prepared.session.metrics
        summary.parameters_sha256 = parameters_sha256(prepared.replica.bare_model)
        digests = self._backend.all_gather_object(summary.parameters_sha256)
        summary.ranks_agree = len(set(digests)) == 1
        summary.profile = None if profiled is None else profiled.summary
        store = prepared.store
        if store is not None:
            write_summary(summary, self._output)
            print(end_report(summary, self._output, checkpoint=store.latest(), best=store.best()), file=sys.stderr)
            if profiled is not None:
                print(f"\n{profiled.text}", file=sys.stderr)
        if not summary.ranks_agree:
            raise TrainingFailed("the ranks ended with different parameters: see ranks_agree in summary.json")
        return EXIT_STOPPED if stopped else EXIT_DONE

    def _compare_configs(self) -> None:
        ours = {key: value for key, value in self._config.to_dict().items() if key != "output"}
        ours["--profile"] = self._profiles
        for rank, other in enumerate(self._backend.all_gather_object(ours)):
            differing = [key for key in ours if other.get(key) != ours[key]]
            if differing:
                key = differing[0]
                raise ConfigError(
                    f"rank {rank} has {key}: {other.get(key)!r}, rank {self._backend.world.rank} has {ours[key]!r}; "
                    f"every rank must read the same job file with the same flags"
                )

    def _prepare_output(self) -> None:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            clear_summary(self._output)
        except OSError as error:
            raise self._unwritable(error) from None

    def _write_config(self) -> None:
        try:
            self._config.dump_yaml(self._output / "config.yaml")
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"output {self._output}: cannot be written ({error}); choose another --output")

    def _check_resume(self, resume: str, resumed: bool) -> None:
        if not self._is_root:
            return
        if resumed:
            logger.info("resumed from step %d, epoch %d", self._position.step, self._position.epoch)
        elif resume == "auto":
            logger.info("--resume auto: %s holds no checkpoint, so this is a fresh start", self._output)

    def _summary(self, status: Any, skipped_steps: int = 0) -> Summary:
        backend = self._backend
        return Summary(
            status=status,
            backend=backend.name,
            launcher=backend.launcher,
            transport=backend.transport,
            world=backend.world,
            steps=self._position.step,
            epochs=self._position.epoch,
            skipped_steps=skipped_steps,
        )

    def _write_failure(self, failure: Failure) -> None:
        # In a background thread of the rank that reports: the root, or the lowest one that is left.
        if not self._started:
            return
        summary = self._summary("failed")
        summary.failure = failure.to_dict()
        write_summary(summary, self._output)
