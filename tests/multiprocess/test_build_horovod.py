"""`hvdtrain build-horovod` as a person runs it, with the wheel that an earlier build left in the cache."""

import os
import shutil
import subprocess

import pytest
from shadow_environment import make_environment

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.cache import WheelCache, WheelKey, default_cache
from hvdtrain.horovod_build.prerequisites import find_toolchain
from hvdtrain.horovod_build.torch_facts import read_torch_facts


def build_horovod(python, *arguments, environ=None):
    return subprocess.run(
        [python, "-m", "hvdtrain", "build-horovod", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **(environ or {})},
        check=False,
    )


@pytest.fixture(scope="module")
def cached():
    """The wheel for this torch; a build takes minutes, so without one there is nothing to test here."""
    facts = read_torch_facts()
    try:
        key = WheelKey.of(facts, find_toolchain(facts, with_mpi=True, with_nccl=True))
    except UserError as error:
        pytest.skip(f"Horovod cannot be built here: {error}")
    wheel = WheelCache(default_cache(os.environ)).find(key)
    if wheel is None:
        pytest.skip("no wheel in the cache: run `hvdtrain build-horovod --wheel-only DIR` once (4 minutes)")
    return wheel


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment without Horovod."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    python, site_packages = make_environment(folder, without=("horovod",))
    if not (site_packages / "pip").exists():
        pytest.skip("the running environment has no pip")
    return python, site_packages


def test_a_cached_wheel_is_installed_and_proven_and_then_left_alone(cached, bare):
    python, site_packages = bare
    first = build_horovod(python)
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"from the cache: {cached}" in first.stdout
    assert f"installed {cached.name}" in first.stdout
    assert "two-process all-reduce: gloo" in first.stdout
    assert "building" not in first.stdout
    assert (site_packages / "horovod" / "metadata.json").is_file()
    assert not (site_packages / "horovod").is_symlink()
    assert (python.parent / "horovodrun").is_file()

    again = build_horovod(python)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "and works (two-process all-reduce over gloo): nothing to do" in again.stdout
    assert f"is installed in {site_packages}" in again.stdout


def test_an_installation_for_another_torch_is_replaced(cached, tmp_path):
    python, site_packages = make_environment(tmp_path / "env", without=("horovod",))
    shutil.unpack_archive(cached, site_packages, format="zip")
    (site_packages / "horovod" / "metadata.json").write_text('{"pytorch": "2.1.0"}')
    done = build_horovod(python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the installed Horovod was built for torch 2.1.0, here is torch" in done.stdout
    assert "two-process all-reduce: gloo" in done.stdout
    assert "2.1.0" not in (site_packages / "horovod" / "metadata.json").read_text()


def test_wheel_only_installs_nothing(cached, tmp_path):
    python, site_packages = make_environment(tmp_path / "env", without=("horovod",))
    done = build_horovod(python, "--wheel-only", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / cached.name).read_bytes() == cached.read_bytes()
    assert not (site_packages / "horovod").exists()
    assert "'numpy>=1.26'" in done.stdout


def test_what_is_missing_is_said_before_anything_starts(bare, tmp_path):
    python, _ = bare
    environ = {"PATH": str(python.parent), "HVDTRAIN_CACHE": str(tmp_path / "cache")}
    done = build_horovod(python, "--force", environ=environ)
    assert done.returncode == 2
    assert (
        "hvdtrain: error: Horovod cannot be built here; missing:\n  - cmake\n  - a C++ compiler (g++)\n" in done.stderr
    )
    assert "apt-get install -y cmake g++ make" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_failed_build_shows_its_error_and_its_log(bare, tmp_path):
    """A compiler that works on small things and fails on Horovod's: the path of every real compile error."""
    python, _ = bare
    tools = tmp_path / "tools"
    tools.mkdir()
    real = shutil.which("c++")
    if real is None or shutil.which("cmake") is None:
        pytest.skip("no compiler or no cmake here")
    compiler = tools / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *gloo*) echo "allgather.cc:7:1: error: planted" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    kept = default_cache(os.environ) / "sources"
    if kept.is_dir():  # saves a download
        shutil.copytree(kept, cache / "sources")
    environ = {"CXX": str(compiler)}
    done = build_horovod(python, "--force", "--without-mpi", "--cache", cache, "--jobs", "1", environ=environ)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hvdtrain: error: building Horovod failed" in done.stderr
    assert "error: planted" in done.stderr
    logs = list((cache / "logs").glob("torch-*-gloo-*.log"))
    assert len(logs) == 1
    assert f"The whole log: {logs[0]}" in done.stderr
    assert "CMakeLists.txt: C++" in logs[0].read_text()
    assert list((cache / "wheels").glob("*/*.whl")) == []
