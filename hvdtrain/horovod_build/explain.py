"""Why `import horovod.torch` failed, and what to do about it."""

from __future__ import annotations

import re

_BUILD = "hvdtrain build-horovod"
# Debian and Ubuntu; the run-time libraries come with the package that has mpirun.
_INSTALL_MPI = "apt-get install -y openmpi-bin"

# What Horovod imports at run time and its wheel does not, or does not fully, declare: module -> package.
_RUNTIME_MODULES = {"numpy": "numpy", "cffi": "cffi", "cloudpickle": "cloudpickle", "psutil": "psutil",
                    "yaml": "pyyaml", "packaging": "packaging"}  # fmt: skip


def failure_kind(text: str) -> str:
    """Which of the usual reasons the error text shows.

    Args:
        text: what the failed import said, for example the last lines of a traceback.

    Returns:
        `not-installed`, `no-extension`, `module:<name>`, `no-numpy`, `no-torch`, `no-libmpi`, `other-torch`,
        `no-library:<name>` or `unknown`.
    """
    missing = re.search(r"No module named '([\w.]+)'", text)
    if missing:
        name = missing.group(1)
        if name in ("horovod", "horovod.torch"):
            return "not-installed"
        if name.split(".")[0] == "numpy":
            return "no-numpy"
        if name == "torch":
            return "no-torch"
        return f"module:{name.split('.')[0]}"
    if "Numpy is not available" in text or "numpy.core.multiarray failed to import" in text:
        return "no-numpy"
    # Horovod compares the versions itself once its library did not load, and hides why that was.
    if "HorovodVersionMismatchError" in text or re.search(r"installed with version .* but found version", text):
        return "other-torch"
    library = re.search(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file", text)
    if library:
        name = library.group(1)
        if re.match(r"lib(mpi|open-rte|open-pal|mpich)", name):
            return "no-libmpi"
        if re.match(r"lib(torch|c10)", name):
            return "other-torch"
        return f"no-library:{name}"
    if "undefined symbol" in text:
        return "other-torch"
    # Without its library, `import horovod.torch` prints a warning and succeeds, with an all but empty module.
    if "has not been built" in text or "mpi_lib_v2" in text or "'horovod.torch' has no attribute" in text:
        return "no-extension"
    return "unknown"


def chain(error: BaseException) -> str:
    """An exception and what it was raised from, one after the other."""
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return "\n".join(texts)


def essence(text: str) -> str:
    """The one line of an error's text that says what is wrong: Horovod's own advice after it is for other times."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.search(r"undefined symbol|cannot open shared object|No module named|has not been built", line):
            return line
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)), "".join(lines[-1:])
    )


def explain_import_failure(error: BaseException | str) -> str:
    """Say why `import horovod.torch` failed and what to do next.

    Args:
        error: the exception that the import raised, or its text.

    Returns:
        One or two sentences for an error message; always names a command. Never raises, imports nothing of Horovod.
    """
    text = error if isinstance(error, str) else chain(error)
    said = f" (it said: {essence(text)})" if text.strip() else ""
    kind = failure_kind(text)
    if kind == "not-installed":
        return f"Horovod is not installed in this environment: build it for the installed torch with `{_BUILD}`."
    if kind == "no-numpy":
        return (
            "Horovod does not load because numpy is missing; it needs it and does not declare it: "
            f"`python -m pip install numpy`, or `{_BUILD}`, which installs it too."
        )
    if kind == "no-torch":
        return f"Horovod does not load because torch is not installed: install torch, then run `{_BUILD}`."
    if kind.startswith("module:"):
        module = kind.partition(":")[2]
        package = _RUNTIME_MODULES.get(module, module)
        return (
            f"Horovod does not load because the Python module {module} is missing: "
            f"`python -m pip install {package}`, or `{_BUILD}`, which installs what Horovod needs."
        )
    if kind == "no-libmpi":
        return (
            f"Horovod was built with MPI, and the MPI library is missing here{said}: `{_INSTALL_MPI}`, "
            f"or build it without MPI: `{_BUILD} --force --without-mpi`. (horovodrun then claims, wrongly, that "
            "neither MPI nor Gloo was built.)"
        )
    if kind == "other-torch":
        return (
            f"The installed Horovod was built for another torch than the installed one{said}: "
            f"build it again with `{_BUILD} --force`."
        )
    if kind == "no-extension":
        return (
            f"The installed Horovod has no torch extension for this Python{said}: it was installed without one, or for "
            f"another Python. Build it again with `{_BUILD} --force`."
        )
    if kind.startswith("no-library:"):
        return (
            f"Horovod does not load because a system library is missing{said}: install the package that has it, or "
            f"build Horovod for this machine with `{_BUILD} --force`."
        )
    return f"Horovod does not load{said}. Build it again for the installed torch with `{_BUILD} --force`."
