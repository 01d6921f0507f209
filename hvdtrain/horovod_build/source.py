"""The pinned source release: fetched through pip, checked against its hash, kept for the next time."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.run import run

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_FETCH_LIMIT_S = 600.0


def fetch_sdist(cache: Path, environ: Mapping[str, str]) -> Path:
    """The checked source archive, from the cache or through pip (so pip's index, proxy and mirrors apply).

    Args:
        cache: folder that keeps it; a machine without network works if the archive was put there.
        environ: environment for pip; setuptools must be importable in it.

    Raises:
        UserError: pip could not fetch it, or what came has another hash.
    """
    kept = cache / SDIST_NAME
    if kept.is_file():
        check_hash(kept)
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as folder:
        # Without build isolation: pip asks the release's setup.py for its name, and would otherwise fetch a
        # setuptools of its own for that. Nothing of the release but this runs before its hash is checked below, so the
        # hash is given to pip as well.
        requirement = Path(folder, "requirement.txt")
        requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet",
                   "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--require-hashes",
                   "--dest", folder, "--requirement", str(requirement)]  # fmt: skip
        fetched = run(command, limit_s=_FETCH_LIMIT_S, environ=environ)
        archive = Path(folder, SDIST_NAME)
        if not fetched.ok or not archive.is_file():
            raise UserError(
                f"pip could not fetch the source release horovod=={HOROVOD_VERSION}:\n"
                f"{_tail(fetched.stderr or fetched.stdout or fetched.reason(_FETCH_LIMIT_S))}\n"
                f"On a machine without network put {SDIST_NAME} (sha256 {SDIST_SHA256}) into {cache} and try again."
            )
        check_hash(archive)
        archive.replace(kept)
    return kept


def check_hash(archive: Path) -> None:
    """Compare an archive with the pinned release.

    Raises:
        UserError: it is another file.
    """
    with archive.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SDIST_SHA256:
        raise UserError(
            f"{archive} is not the released {SDIST_NAME}: its sha256 is {digest.hexdigest()}, expected {SDIST_SHA256}. "
            "Delete it and run this again."
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a checked archive into `folder`, an existing folder; returns the folder with setup.py in it."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python before 3.10.12; the archive is a known one, its hash was checked.
            tar.extractall(folder)
    return folder / SDIST_NAME.removesuffix(".tar.gz")


def free_bytes(folder: Path) -> int:
    """Free space on the disk that holds `folder`, or that will hold it once it is made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _tail(text: str, num_lines: int = 12) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-num_lines:])
