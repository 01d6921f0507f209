"""`import horovod.torch` failed: each usual reason is told apart, with its command."""

import pytest

from hvdtrain.horovod_build.explain import explain_import_failure, failure_kind

VERSION_MISMATCH = (
    "HorovodVersionMismatchError: Framework pytorch installed with version 2.1.0 but found version 2.13.0.\n"
    "    Reinstall Horovod using `pip install --no-cache-dir` to build with the new version.\n"
    "ImportError: libmpi.so.40: cannot open shared object file: No such file or directory"
)
SAID = [
    ("ModuleNotFoundError: No module named 'horovod'", "not-installed", "`hvdtrain build-horovod`"),
    ("ModuleNotFoundError: No module named 'numpy'", "no-numpy", "pip install numpy"),
    ("ModuleNotFoundError: No module named 'torch'", "no-torch", "install torch"),
    ("ModuleNotFoundError: No module named 'yaml'", "module:yaml", "pip install pyyaml"),
    (
        "ImportError: libmpi.so.40: cannot open shared object file: No such file or directory",
        "no-libmpi",
        "apt-get install -y openmpi-bin",
    ),
    (
        "ImportError: /x/horovod/torch/mpi_lib_v2.cpython-311.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv",
        "other-torch",
        "`hvdtrain build-horovod --force`",
    ),
    (
        "ImportError: libtorch_cpu.so: cannot open shared object file: No such file or directory",
        "other-torch",
        "`hvdtrain build-horovod --force`",
    ),
    (
        "ImportError: libnccl.so.2: cannot open shared object file: No such file or directory",
        "no-library:libnccl.so.2",
        "`hvdtrain build-horovod --force`",
    ),
    (
        "ImportError: cannot import name 'mpi_lib_v2' from 'horovod.torch' (/x/horovod/torch/__init__.py)",
        "no-extension",
        "`hvdtrain build-horovod --force`",
    ),
    (
        "AttributeError: module 'horovod.torch' has no attribute 'init'",
        "no-extension",
        "`hvdtrain build-horovod --force`",
    ),
    (
        # As Horovod words it, and what it was raised from.
        VERSION_MISMATCH,
        "other-torch",
        "(it said: ImportError: libmpi.so.40: cannot open shared object file",
    ),
    ("RuntimeError: quite another thing", "unknown", "quite another thing"),
    ("", "unknown", "`hvdtrain build-horovod --force`"),
]


@pytest.mark.parametrize(("text", "kind", "cure"), SAID)
def test_each_reason_has_its_cure(text, kind, cure):
    assert failure_kind(text) == kind
    message = explain_import_failure(text)
    assert cure in message
    assert "hvdtrain build-horovod" in message


def test_what_an_exception_was_raised_from_is_looked_at_too():
    error = ImportError("it does not load\n    some advice")
    error.__cause__ = ImportError("/x/mpi_lib_v2.so: undefined symbol: _ZN2at1xE")
    assert "(it said: ImportError: /x/mpi_lib_v2.so: undefined symbol: _ZN2at1xE)" in explain_import_failure(error)


def test_an_exception_is_as_good_as_its_text():
    error = ModuleNotFoundError("No module named 'horovod'")
    assert explain_import_failure(error).startswith("Horovod is not installed in this environment")
