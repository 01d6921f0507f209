"""The folder of checkpoints of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hvdtrain.checkpoint.atomic import atomic_write, remove_leftovers
from hvdtrain.checkpoint.best import BestRecord, BestRule
from hvdtrain.checkpoint.checksum import damage, save_with_checksum
from hvdtrain.checkpoint.document import from_document, to_document
from hvdtrain.errors import CheckpointError, UserError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})\.pt")
# After the name of a checkpoint that is out of the run but may be wanted; nothing of ours touches it again.
_SET_ASIDE = ".abandoned"


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint to resume from, already read and verified.

    Attributes:
        skipped: the newer files that could not be read, with the reason (warned about already).
    """

    path: Path
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])


class CheckpointStore:
    """Writes, keeps and finds `step-XXXXXXXX.pt` in a folder. For rank 0 alone; nothing here is collective.

    Making one removes the temporary files of dead writers. The folder is made by the first `save`.

    A run that was resumed from before the newest checkpoint abandons the later ones: they do not compete for the best
    any more, and go when the first one is saved in their place.

    Args:
        keep: how many of the newest checkpoints stay, at least 1; None: all of them.
        best: the checkpoint that is best by this rule stays too.
    """

    def __init__(self, folder: Path, *, keep: int | None = 3, best: BestRule | None = None) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"checkpoint.keep is {keep}: at least 1 checkpoint must be kept")
        self.folder = Path(folder)
        self._keep = keep
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file, but checkpoints need a folder there: choose another --output")
        for name in remove_leftovers(self.folder) if self.folder.is_dir() else []:
            logger.info("removed %s, left by a process that died while it saved", self.folder / name)
        self._record = BestRecord(self.folder, best)
        # The last checkpoint of this run, resumed from or saved; later ones are of an abandoned run. None: unknown.
        self._last_step: int | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, ascending; damaged ones too."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def latest(self) -> Path | None:
        """The newest checkpoint, unverified."""
        steps = self.steps()
        return self.path_of(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The best checkpoint by the rule, if there is a rule and a checkpoint with a value."""
        step = self._record.best_of(self.steps())
        return None if step is None else self.path_of(step)

    def would_be_best(self, metrics: dict[str, float]) -> bool:
        """Whether a checkpoint with these metrics would become the best one of this run. False without a rule."""
        return self._record.would_be_best(metrics, [step for step in self.steps() if not self._is_abandoned(step)])

    def _is_abandoned(self, step: int) -> bool:
        return self._last_step is not None and step > self._last_step

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, float] | None = None) -> Path:
        """Write the checkpoint of a step; then, and only then, delete those that need not be kept.

        Checkpoints of later steps are deleted too: they are of a run that was resumed from before them, and would
        otherwise be taken for the newest. If one of them was the best of all, it stays as `step-XXXXXXXX.pt.abandoned`.

        Args:
            state: exactly the keys of format 1 (see `document.KEYS`); its progress is of this step.
            metrics: evaluation of this state, if there was one; what `best` compares.

        Raises:
            CheckpointError: the state has wrong keys, or something that has no plain form.
            TrainingFailed: the file could not be written; older checkpoints are as they were.
            UserError: the metric of the best rule is not among `metrics`.
        """
        document = to_document(state, step=step)
        path = self.path_of(step)
        before = self.steps()
        abandoned = [old for old in before if old > step or self._is_abandoned(old)]
        stay = [old for old in before if old < step and old not in abandoned]
        best = self._record.best_of(before)
        wanted = best if best in abandoned else None
        self._record.record(step, metrics, stay, replaces=step in abandoned)
        with self._set_aside(step) if wanted == step else contextlib.nullcontext(), atomic_write(path) as file:
            save_with_checksum(document, file)
        self._last_step = step
        if wanted is not None and wanted != step:
            with self._set_aside(wanted):
                pass
        abandoned = [old for old in abandoned if old not in (step, wanted)]
        if abandoned:
            logger.warning(
                "deleting the checkpoints of steps %s in %s: this run continued from before them",
                ", ".join(map(str, abandoned)),
                self.folder,
            )
        newest = [*stay, step]
        keep = {*newest[-(self._keep or len(newest)) :], self._record.best_of(newest)}
        for old in [*abandoned, *(old for old in newest if old not in keep)]:
            with contextlib.suppress(FileNotFoundError):
                self.path_of(old).unlink()
        return path

    @contextlib.contextmanager
    def _set_aside(self, step: int) -> Iterator[None]:
        """Give the checkpoint of a step another name; back to its own if the block fails."""
        path = self.path_of(step)
        aside = path.with_name(path.name + _SET_ASIDE)
        path.replace(aside)
        try:
            yield
        except BaseException:
            aside.replace(path)
            raise
        logger.warning("%s was the best until now, but this run continued from before it: kept as %s", path, aside.name)

    def find(self, resume: str | Path) -> Found | None:
        """What to resume from.

        Args:
            resume: "none": start afresh. "auto": the newest readable checkpoint of the folder, or None if it has
                none at all. A path: this file, or the newest readable checkpoint of this folder (of checkpoints, or
                of a run).

        Raises:
            UserError: the folder holds checkpoints that the run would mix with or write over.
            CheckpointError: a path is missing or cannot be read, or none of the checkpoints can.
        """
        if str(resume) == "none":
            self._refuse_existing()
            return None
        found = self._newest_readable() if str(resume) == "auto" else self._at_path(Path(resume))
        if found is not None and found.path.resolve().parent == self.folder.resolve():
            self._last_step = found.step
        return found

    def _refuse_existing(self, why: str = "") -> None:
        steps = self.steps()
        if steps:
            raise UserError(
                f"{self.folder} already holds checkpoints, the last of step {steps[-1]}{why}. Continue from there with "
                f"--resume auto, or choose another --output"
            )

    def _newest_readable(self) -> Found | None:
        skipped: list[str] = []
        for step in reversed(self.steps()):
            path = self.path_of(step)
            try:
                state = load(path)
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            for reason in skipped:
                logger.warning("%s", reason)
            if skipped:
                logger.warning("falling back to the checkpoint before: %s", path)
            return Found(path, state, tuple(skipped))
        if skipped:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be read:\n  "
                + "\n  ".join(skipped)
                + "\nTo start afresh, choose another --output or remove the folder"
            )
        return None

    def _at_path(self, path: Path) -> Found:
        if not path.exists():
            steps = self.steps()
            hint = f" {self.folder} has steps {', '.join(map(str, steps))}." if steps else ""
            raise CheckpointError(
                f"--resume {path}: there is no such file or folder.{hint} --resume auto takes the newest"
            )
        own = self.folder.resolve()
        if path.is_dir():
            folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            if folder.resolve() == own:
                found = self._newest_readable()
            else:
                self._refuse_existing(f", which are not those of --resume {path}")
                found = CheckpointStore(folder, keep=self._keep)._newest_readable()
            if found is None:
                raise CheckpointError(f"--resume {path}: there is no step-XXXXXXXX.pt in {folder}")
            return found
        if path.resolve().parent != own:
            self._refuse_existing(f", and --resume {path} is not one of them")
        found = Found(path, load(path))
        later = [step for step in self.steps() if step > found.step]
        if later and path.resolve().parent == own:
            logger.warning(
                "resuming from step %d; the later checkpoints (steps %s) will be deleted when the next one is saved",
                found.step,
                ", ".join(map(str, later)),
            )
        return found


def load(path: Path) -> dict[str, Any]:
    """Read and verify one checkpoint, tensors on the CPU, model keys without the names of wrappers.

    Raises:
        CheckpointError: it is missing, damaged, or not a checkpoint of a known format; with path and reason.
    """
    try:
        reason = damage(path)
        if reason is not None:
            raise CheckpointError(f"{path} cannot be used: {reason}")
        document = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch raises RuntimeError, UnpicklingError and others
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be used: torch.load says: {first_line}") from error
    return from_document(path, document)
