"""Where a task's file is looked for."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.config.problems import nearest


def find_task_file(written: str, config_file: str = "") -> Path | None:
    """The file that `written` names, absolute and with links resolved; None if it names a module (`package.module`).

    A relative path is looked for in the working directory first, as everywhere on a command line; then in the job
    file's folder and in the folders above it, so that a job file of a repository works from any directory.

    Raises:
        FileNotFoundError: it ends in .py or holds a slash, and no such file is there. The message says where it was
            looked for, and the nearest file there is.
    """
    if "/" not in written and not written.endswith(".py"):
        return None
    path = Path(written).expanduser()
    if path.is_absolute():
        folders = [Path("/")]
    else:
        folders = [Path.cwd()]
        if config_file:
            folder = Path(config_file).resolve().parent
            folders += [folder, *folder.parents]
    for folder in folders:
        if (folder / path).is_file():
            return (folder / path).resolve()
    places = "" if path.is_absolute() else f" in {folders[0]}"
    if len(folders) > 1 and folders[1] != folders[0]:
        places += f" or {folders[1]} and the folders above it"
    elif len(folders) > 1:
        places += " and the folders above it"
    raise FileNotFoundError(f"no file {written}{places}{_suggestion(path, folders)}")


def _suggestion(path: Path, folders: list[Path]) -> str:
    for folder in folders:
        beside = (folder / path).parent
        if beside.is_dir():
            names = [entry.name for entry in beside.iterdir() if entry.suffix == ".py"]
            if found := nearest(path.name, names):
                return f"; did you mean {path.with_name(found)}?"
    return ""
