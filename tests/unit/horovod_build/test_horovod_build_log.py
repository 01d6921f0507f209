"""What a build shows: how far it is, what it failed of; and the environment that it is given."""

from pathlib import Path

from hvdtrain.horovod_build.build import build_environ, decisive_lines, progress
from hvdtrain.horovod_build.prerequisites import Toolchain
from hvdtrain.horovod_build.torch_facts import TorchFacts

FACTS = TorchFacts("2.13.0+cpu", "/nowhere/torch", True, None, None, None, 20)


def test_progress_is_read_from_make(tmp_path):
    log = tmp_path / "log"
    log.write_text("-- Configuring done\n")
    assert progress(log) == "(configuring)"
    log.write_text(
        "  [  2%] Building CXX object third_party/gloo/gloo/CMakeFiles/gloo.dir/algorithm.cc.o\n"
        "  [ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/half.cc.o\n  /usr/bin/c++ ...\n"
    )
    assert progress(log) == " 42 % half.cc"
    log.write_text("[100%] Linking CXX shared library mpi_lib_v2.so\n")
    assert progress(log) == "100 %"


def test_the_first_error_is_shown_not_the_end_of_the_log():
    text = "ok\n" * 50 + "a.cc:3:1: error: no member named 'x'\n  note\n" + "more\n" * 50
    shown = decisive_lines(text, num_lines=3).splitlines()
    assert shown == ["    a.cc:3:1: error: no member named 'x'", "      note", "    more"]
    assert decisive_lines("one\ntwo\nthree", num_lines=2) == "    two\n    three"


def test_the_build_does_not_take_over_what_somebody_exported(tmp_path):
    base = {"PATH": "/bin", "HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_GPU_OPERATIONS": "MPI", "CUDA_HOME": "/cuda"}
    with_mpi = build_environ(base, FACTS, Toolchain("c++", "3.25.1", "Open MPI 4.1.4", None), 3, tmp_path)
    assert {name: value for name, value in with_mpi.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
    }
    assert with_mpi["MAKEFLAGS"] == "-j3"
    assert with_mpi["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert "CUDA_HOME" not in with_mpi
    without = build_environ(base, FACTS, Toolchain("c++", "3.25.1", None, None), 1, tmp_path)
    assert without["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in without


def test_nccl_is_torchs_own(tmp_path):
    package = tmp_path / "nvidia" / "nccl"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libnccl.so.2").write_bytes(b"")
    facts = TorchFacts("2.13.0+cu128", "/nowhere/torch", True, "12.8", None, str(package), 20)
    environ = build_environ({}, facts, Toolchain("c++", "3.25.1", None, "/usr/local/cuda"), 1, tmp_path)
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environ["CUDA_HOME"] == "/usr/local/cuda"
    assert environ["HOROVOD_NCCL_INCLUDE"] == str(package / "include")
    assert Path(environ["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == package / "lib" / "libnccl.so.2"
    assert environ["HOROVOD_NCCL_LINK"] == "SHARED"
