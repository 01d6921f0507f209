"""The pinned release: its hash, and the lines of it that are changed."""

import http.server
import socketserver

import pytest

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.installed import FAST_FP16_MARK, find_installed
from hvdtrain.horovod_build.patch import patch_source
from hvdtrain.horovod_build.source import SDIST_NAME, SDIST_SHA256, check_hash, fetch_sdist
from hvdtrain.horovod_build.torch_facts import cxx_standard

TOP = "project(horovod CXX)\n\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
TOP += "if (gloo)\n    add_subdirectory(third_party/gloo)\nendif()\n"
TORCH = """execute_process(
    COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
"""
JS_RUN = "import os\nfrom distutils.spawn import find_executable\n"
SERVERS = """class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):
    def __init__(self, addr, handler, verbose):
        pass


class KVStoreHTTPServer(HTTPServer, object):
    def __init__(self, addr, handler, verbose):
        pass
"""


@pytest.fixture
def release(tmp_path):
    """The files of the release that are changed, as far as they matter."""
    for name, text in (
        ("CMakeLists.txt", TOP),
        ("horovod/torch/CMakeLists.txt", TORCH),
        ("horovod/runner/js_run.py", JS_RUN),
        ("horovod/runner/http/http_server.py", SERVERS),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_changed_in_the_release(release):
    changes = patch_source(release, 20)
    assert (release / "CMakeLists.txt").read_text() == TOP.replace("STANDARD 14", "STANDARD 20")
    torch = (release / "horovod/torch/CMakeLists.txt").read_text()
    assert "    set(CMAKE_CXX_STANDARD 20)\n" in torch
    assert "-c \"import sysconfig; print(sysconfig.get_path('include'))\"" in torch
    assert (
        release / "horovod/runner/js_run.py"
    ).read_text() == "import os\nfrom shutil import which as find_executable\n"
    assert changes == [
        "CMakeLists.txt: C++20 instead of C++14",
        "horovod/torch/CMakeLists.txt: C++20 instead of C++14",
        "horovod/torch/CMakeLists.txt: without distutils",
        "horovod/runner/js_run.py: without distutils",
        "horovod/runner/http/http_server.py: the ranks' server lets more than 5 ranks wait",
        "horovod/runner/http/http_server.py: the launchers' server lets more than 5 ranks wait",
    ]
    names = {"HTTPServer": http.server.HTTPServer, "socketserver": socketserver}
    exec((release / "horovod/runner/http/http_server.py").read_text(), names)
    assert names["RendezvousHTTPServer"].request_queue_size == 4096
    assert names["KVStoreHTTPServer"].request_queue_size == 4096


def test_fast_fp16_sums_are_switched_on_before_gloo_reads_its_options(release):
    changes = patch_source(release, 20, fast_fp16=True)
    top = (release / "CMakeLists.txt").read_text()
    assert top.index("-mf16c") < top.index("set(USE_AVX ON)") < top.index("    add_subdirectory(third_party/gloo)\n")
    assert top.index("add_subdirectory") < top.index("target_sources(gloo")
    assert top.count("add_subdirectory") == 1
    assert changes[-2:] == [
        "horovod/runner/http/http_server.py: the launchers' server lets more than 5 ranks wait",
        "CMakeLists.txt: gloo's vector sums of float16",
    ]
    assert (release / FAST_FP16_MARK).is_file()


def test_an_installation_tells_whether_its_fp16_sums_are_fast(release):
    (release / "horovod/torch/__init__.py").touch()
    as_released = find_installed([str(release)])
    assert as_released is not None
    assert not as_released.fast_fp16
    patch_source(release, 20, fast_fp16=True)
    fast = find_installed([str(release)])
    assert fast is not None
    assert fast.fast_fp16


def test_another_release_is_refused_with_the_file_named(release):
    (release / "CMakeLists.txt").write_text(TOP.replace("14", "17"))
    with pytest.raises(UserError, match=r"CMakeLists\.txt: found 0 lines .* not Horovod 0\.28\.1 as released"):
        patch_source(release, 20)


def test_a_file_with_another_hash_is_refused(tmp_path):
    (tmp_path / SDIST_NAME).write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    with pytest.raises(UserError) as error:
        check_hash(tmp_path / SDIST_NAME)
    assert f"its sha256 is {empty}, expected {SDIST_SHA256}. Delete it" in str(error.value)
    # A damaged file in the cache is named, not built.
    with pytest.raises(UserError, match=empty):
        fetch_sdist(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "extension", "version", "expected"),
    [
        ("set_target_properties(torch PROPERTIES\n    CXX_STANDARD 20\n)", "", "2.13.0+cpu", 20),
        ("    CXX_STANDARD 17\n", "cflags = ['-std=c++20']", "2.7.1", 17),
        (None, "cflags = common_cflags + ['-fPIC', '-std=c++17'] + extra", "2.4.0", 17),
        (None, None, "2.1.0", 17),
        (None, None, "2.0.1+cu117", 14),
    ],
)
def test_the_standard_is_what_torch_itself_states(tmp_path, config, extension, version, expected):
    for name, text in (("share/cmake/Torch/TorchConfig.cmake", config), ("utils/cpp_extension.py", extension)):
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text)
    assert cxx_standard(tmp_path, version) == expected
