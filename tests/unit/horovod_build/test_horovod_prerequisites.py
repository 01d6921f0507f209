"""What the build needs from the system is looked for before it starts; one apt line brings all that is missing."""

import shutil
from pathlib import Path

import pytest

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.prerequisites import Missing, find_mpi, find_toolchain, missing_message
from hvdtrain.horovod_build.torch_facts import TorchFacts

FACTS = TorchFacts("2.13.0+cpu", "/nowhere/torch", True, None, None, None, 20)


def script(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_all_that_is_missing_is_named_at_once_with_one_apt_line(tmp_path):
    with pytest.raises(UserError) as error:
        find_toolchain(FACTS, with_mpi=True, with_nccl=True, environ={"PATH": str(tmp_path)})
    lines = str(error.value).splitlines()
    assert lines[0] == "Horovod cannot be built here; missing:"
    assert "  - cmake" in lines
    assert "  - a C++ compiler (g++)" in lines
    assert "  - make (what cmake builds with)" in lines
    assert "apt-get install -y cmake g++ make" in lines[-1]


def test_an_old_cmake_and_an_old_compiler_are_missing_too(tmp_path):
    script(tmp_path, "cmake", "echo cmake version 3.10.2")
    script(tmp_path, "make", "true")
    script(tmp_path, "c++", "echo \"c++: error: unrecognized option '-std=c++20'\" >&2; exit 1")
    with pytest.raises(UserError) as error:
        find_toolchain(FACTS, with_mpi=False, with_nccl=True, environ={"PATH": str(tmp_path)})
    message = str(error.value)
    assert f"cmake 3.13 or newer ({tmp_path}/cmake is 3.10.2)" in message
    assert "a C++20 compiler, as the installed torch asks for" in message
    assert "unrecognized option '-std=c++20'" in message


def test_cuda_torch_without_toolkit_says_what_to_install_and_how_to_go_without(tmp_path, monkeypatch):
    facts = TorchFacts("2.13.0+cu128", "/nowhere/torch", True, "12.8", None, "/nowhere/nccl", 20)
    for name in ("make", "c++"):
        script(tmp_path, name, "true")
    script(tmp_path, "cmake", "echo cmake version 3.25.1")
    environ = {"PATH": str(tmp_path)}
    monkeypatch.setattr("hvdtrain.horovod_build.prerequisites.USUAL_CUDA_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"--without-nccl.*\n(.*\n)*.*cuda-toolkit-12-8"):
        find_toolchain(facts, with_mpi=False, with_nccl=True, environ=environ)
    assert find_toolchain(facts, with_mpi=False, with_nccl=False, environ=environ).cuda_home is None


def test_no_mpi_headers_is_a_note_and_not_an_error(tmp_path):
    for name in ("make", "c++"):
        script(tmp_path, name, "true")
    script(tmp_path, "cmake", "echo cmake version 4.1.0")
    script(tmp_path, "mpicxx", "echo 'fatal error: mpi.h: No such file' >&2; exit 1")
    found = find_toolchain(FACTS, with_mpi=True, with_nccl=True, environ={"PATH": str(tmp_path)})
    assert found.mpi is None
    assert found.cmake_version == "4.1.0"
    assert "apt-get install -y libopenmpi-dev openmpi-bin" in found.notes[0]


@pytest.mark.parametrize(
    ("preprocessed", "expected"),
    [
        ("MPI= Open MPI 4 1 4", "Open MPI 4.1.4"),
        ('MPI= MPICH "4.0.2"', "MPICH 4.0.2"),
        ("MPI= MPI 3 1", "MPI 3.1"),
        ("nothing", None),
    ],
)
def test_mpi_is_named_by_its_own_header(tmp_path, preprocessed, expected):
    script(tmp_path, "mpicxx", f"cat > /dev/null; echo '{preprocessed}'")
    assert find_mpi({"PATH": f"{tmp_path}:{Path(shutil.which('cat')).parent}"}) == expected


def test_the_message_names_each_package_once():
    message = missing_message([Missing("a", ("cmake", "g++")), Missing("b", ("g++",))])
    assert message.endswith("apt-get install -y cmake g++")
