"""The set-up script: what it says when something is missing, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]


def _bash(script: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f". .setup/venv.sh\n{script}"],
        cwd=TOP,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_without_root_it_prints_the_line_and_installs_nothing():
    done = _bash(
        "id() { echo 1000; }\napt-get() { echo CALLED; }\nmissing=(python3-venv g++)\ninstall_missing 'the tests'\n"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: system packages are missing for the tests. Install them and run this again:\n\n"
        "    sudo apt-get update && sudo apt-get install -y --no-install-recommends python3-venv g++\n\n"
    )


def test_as_root_it_says_what_it_installs_before_it_does():
    done = _bash(
        'id() { echo 0; }\napt-get() { echo "CALLED $*" >&2; }\nmissing=(python3-venv)\ninstall_missing Python 2>&1\n'
    )
    assert done.returncode == 0
    assert done.stdout == (
        "== installing system packages for Python with apt-get: python3-venv\n"
        "CALLED update -qq\n"
        "CALLED install -y -qq --no-install-recommends python3-venv\n"
    )


def test_without_apt_it_names_the_packages():
    done = _bash(
        "command() { case $* in '-v apt-get') return 1 ;; *) builtin command \"$@\" ;; esac; }\n"
        "missing=(openmpi-bin)\ninstall_missing 'the tests'\n"
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: the tests: this machine lacks what Debian calls: openmpi-bin. Install it and run this again.\n"
    )


def test_nothing_missing_does_nothing():
    done = _bash("install_missing 'the tests'\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("answer", "missing"), [("ok", ""), ("no-venv", "python3-venv")])
def test_a_python_without_venv_names_its_package(tmp_path, answer, missing):
    # Debian's python3 without python3-venv: everything works but `import ensurepip`.
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *ensurepip*) [ {answer} = ok ]; exit ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = _bash('find_python\necho "$PYTHON ${missing[*]}"\n', PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, f"python3 {missing}\n")


def test_no_python_names_both_packages(tmp_path):
    for name in ("bash", "sh"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    done = _bash('find_python\necho "$PYTHON ${missing[*]}"\n', PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "python3 python3 python3-venv\n")


def test_an_old_python_is_an_error(tmp_path):
    for name in ("bash", "sh"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.2 ;; *) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = _bash("find_python\n", PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {python} is Python 3.9.2; 3.10 or newer is needed. Another one: PYTHON=/path/to/python3 bash bash\n"
    )


def test_the_chosen_python_comes_first():
    done = _bash('find_python\necho "$PYTHON"\n', PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, f"{sys.executable}\n")


def test_a_fresh_machine_gets_all_that_builds_horovod(tmp_path):
    """The list that tests/run.sh and .ci/cluster share. The Python that is there lacks its headers."""
    (tmp_path / "bash").symlink_to("/bin/bash")
    (tmp_path / "python3").symlink_to("/bin/false")
    script = ". .setup/programs.sh\nPYTHON=python3\nneed_for_tests\necho ${missing[*]}\n"
    done = _bash(script, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {"g++", "make", "cmake", "libopenmpi-dev", "openmpi-bin", "python3-dev"} <= set(done.stdout.split())
    for script in ("tests/run.sh", ".ci/cluster"):
        assert "\nneed_for_tests\n" in (TOP / script).read_text()
