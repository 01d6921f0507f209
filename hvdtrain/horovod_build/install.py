"""Installing a wheel with what it needs at run time; borrowing what a build needs without installing it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.run import run

# What horovod.torch imports; its wheel does not declare numpy.
RUNTIME_REQUIREMENTS = ("cffi>=1.15", "cloudpickle>=2.2", "numpy>=1.26", "psutil>=5.9", "pyyaml>=6.0", "packaging>=23")
# The release's setup.py is a classic one: setuptools up to 79 is known to run it, and torch's extension builder.
BUILD_REQUIREMENTS = ("setuptools>=68,<80", "wheel>=0.42")

_INSTALL_LIMIT_S = 900.0
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def missing_requirements(requirements: Sequence[str]) -> list[str]:
    """Those of the requirements that the running environment does not meet. Nothing that is there is upgraded."""
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if Version(version) not in requirement.specifier:
            missing.append(text)
    return missing


def check_pip() -> None:
    """Raises UserError where the environment has no pip (uv makes such ones)."""
    asked = run([sys.executable, *_PIP, "--version"], limit_s=60.0)
    if not asked.ok:
        raise UserError(
            f"{sys.executable} has no pip, which fetches, builds and installs Horovod: "
            f"`{sys.executable} -m ensurepip`, or `apt-get install -y python3-pip python3-venv`; "
            "in an environment made by uv: `uv pip install pip`"
        )


def borrow(folder: Path, requirements: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the requirements are met, without installing anything into the running one.

    Args:
        folder: where what is missing is put; empty or absent when nothing is.
        requirements: what the build or the proof needs.
        environ: the environment to extend.

    Raises:
        UserError: pip could not get what is missing.
    """
    missing = missing_requirements(requirements)
    extended = dict(environ)
    if not missing:
        return extended
    command = [sys.executable, *_PIP, "install", "--quiet", "--target", str(folder), *missing]
    done = run(command, limit_s=_INSTALL_LIMIT_S, environ=environ)
    if not done.ok:
        raise UserError(
            f"pip could not get {', '.join(missing)}, which the build needs: {done.reason(_INSTALL_LIMIT_S)}"
        )
    extended["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH"))))
    return extended


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> list[str]:
    """Install the wheel over whatever Horovod is there, and what it needs; returns the packages added besides it.

    Raises:
        UserError: pip refused, for example because the environment belongs to the system.
    """
    missing = missing_requirements(RUNTIME_REQUIREMENTS)
    if missing:
        _pip_install(missing, environ)
    # Never with its own dependencies: one of them may drag in another torch.
    _pip_install(["--no-deps", "--force-reinstall", str(wheel)], environ)
    return missing


def _pip_install(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    command = [sys.executable, *_PIP, "install", "--quiet", *arguments]
    done = run(command, limit_s=_INSTALL_LIMIT_S, environ=environ)
    if done.ok:
        return
    advice = ""
    if "externally-managed-environment" in done.stderr:
        advice = "\nThis Python belongs to the system: make a virtual environment (python3 -m venv) with torch in it."
    raise UserError(
        f"pip could not install {' '.join(arguments)}: {done.reason(_INSTALL_LIMIT_S)}\n"
        + "\n".join("    " + line for line in done.stderr.strip().splitlines()[-12:])
        + advice
    )
