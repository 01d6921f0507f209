"""The lines of the 0.28.1 release that a current torch, cmake or Python needs changed, and a few that cost time."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_build.installed import FAST_FP16_MARK

# The two files set the standard, each for what comes after: the second one overrides the first for torch's extension.
_STANDARD_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
_STANDARD_LINE = re.compile(r"^(\s*set\(CMAKE_CXX_STANDARD) 14\)", re.MULTILINE)

# Python 3.12 has no distutils; the replacement is in the standard library of every Python that we support.
_DISTUTILS = "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
_SYSCONFIG = "import sysconfig; print(sysconfig.get_path('include'))"

# js_run is imported by horovodrun at its start, whatever the cluster.
_JS_RUN = "horovod/runner/js_run.py"
_FIND_EXECUTABLE = "from distutils.spawn import find_executable"
_WHICH = "from shutil import which as find_executable"

# horovodrun's servers let five connections wait. Sixteen ranks that come at once find the queue full, and the kernel
# tries again after 1, 3, 7 and 15 seconds.
_SERVERS = "horovod/runner/http/http_server.py"
_RENDEZVOUS = "class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
_KEY_VALUE = "class KVStoreHTTPServer(HTTPServer, object):\n"
_LONG_QUEUE = "    request_queue_size = 4096\n\n"

# gloo has a sum of float16 in AVX and F16C instructions that nothing in the release switches on or compiles. Horovod's
# own flags (for its half.cc) tell whether the building machine has them; the definition is for gloo's files that do not
# read its config.h.
_ADD_GLOO = "    add_subdirectory(third_party/gloo)\n"
_ADD_FAST_GLOO = f"""    if(NOT CMAKE_CXX_FLAGS MATCHES "-mavx" OR NOT CMAKE_CXX_FLAGS MATCHES "-mf16c")
        message(FATAL_ERROR "fast sums of float16 need a processor with AVX and F16C: build without --fast-fp16")
    endif()
    set(USE_AVX ON)
    add_definitions(-DGLOO_USE_AVX=1)
{_ADD_GLOO}    target_sources(gloo PRIVATE "${{PROJECT_SOURCE_DIR}}/third_party/gloo/gloo/math.cc")
"""


def patch_source(folder: Path, cxx_standard: int, *, fast_fp16: bool = False) -> list[str]:
    """Change an unpacked release in place so that it builds for the installed torch.

    Args:
        folder: the unpacked release, where its setup.py is.
        cxx_standard: the C++ standard to build with; 14 leaves the release's own.
        fast_fp16: also switch on gloo's sums of float16 in vector instructions.

    Returns:
        One line per change: what was changed, in which file.

    Raises:
        UserError: a line to change is not there, so this is not the release that the recipe knows.
    """
    changes = []
    for name in _STANDARD_FILES:
        text = (folder / name).read_text(encoding="utf-8")
        text, count = _STANDARD_LINE.subn(rf"\g<1> {cxx_standard})", text)
        if count != 1:
            raise UserError(
                f"{folder / name}: found {count} lines `set(CMAKE_CXX_STANDARD 14)`, expected one: "
                "this is not Horovod 0.28.1 as released. Delete the cached source and fetch it again."
            )
        (folder / name).write_text(text, encoding="utf-8")
        changes.append(f"{name}: C++{cxx_standard} instead of C++14")
    replacements = [
        ("horovod/torch/CMakeLists.txt", _DISTUTILS, _SYSCONFIG, "without distutils"),
        (_JS_RUN, _FIND_EXECUTABLE, _WHICH, "without distutils"),
        (_SERVERS, _RENDEZVOUS, _RENDEZVOUS + _LONG_QUEUE, "the ranks' server lets more than 5 ranks wait"),
        (_SERVERS, _KEY_VALUE, _KEY_VALUE + _LONG_QUEUE, "the launchers' server lets more than 5 ranks wait"),
    ]
    if fast_fp16:
        replacements.append(("CMakeLists.txt", _ADD_GLOO, _ADD_FAST_GLOO, "gloo's vector sums of float16"))
        (folder / FAST_FP16_MARK).write_text(
            '"""Marks a build with gloo\'s vector sums of float16."""\n', encoding="utf-8"
        )
        changes.append(f"{FAST_FP16_MARK}: new, marks this build")
    for name, old, new, what in replacements:
        text = (folder / name).read_text(encoding="utf-8")
        if old not in text:
            raise UserError(f"{folder / name}: no `{old.strip()}`: this is not Horovod 0.28.1 as released.")
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
        changes.append(f"{name}: {what}")
    return changes
