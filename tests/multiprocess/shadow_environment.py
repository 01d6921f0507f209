"""A real Python environment like the running one, less some packages: every entry is a link, so it costs no time."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder, without=()):
    """Make a virtual environment in `folder`.

    Args:
        folder: where; must not exist.
        without: packages that are left out, by the name of their folder ("numpy" takes its metadata too).

    Returns:
        (python, site_packages): its interpreter, and the folder to plant things in.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    for source in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in source.iterdir():
            name = entry.name.split("-")[0].split(".")[0].lower()
            if name not in without and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
    return python, target
