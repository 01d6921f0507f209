"""The public API has the names, argument orders and defaults of horovod.torch 0.28.1.

signatures.json was recorded from the real one, as [name, kind, default, has a default] per parameter; where Horovod is
installed, the record itself is checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from hvdtrain.hvd import alias

RECORD = json.loads(Path(__file__).with_name("signatures.json").read_text())
# init and shutdown are recorded as what they pass their arguments on to.
PASSED_ON = {"init", "shutdown"}
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None and importlib.util.find_spec("horovod.torch") is not None


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [[p.name, p.kind.name, default(p), p.default is not p.empty] for p in parameters]


def default(parameter):
    value = parameter.default
    if value is parameter.empty:
        return None
    if isinstance(value, (int, float, str, type(None))):
        return value
    return value.__name__ if inspect.isclass(value) else type(value).__name__


def find(path, real):
    module, _, name = path.partition(":")
    if not real:
        module = alias.ALIASES[module]
        if name == "_DistributedOptimizer":
            name = "DistributedMixin"
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", sorted(RECORD["functions"]))
def test_function(path):
    assert signature(find(path, real=False)) == RECORD["functions"][path]


@pytest.mark.parametrize("path", sorted(RECORD["classes"]))
def test_class(path):
    ours = find(path, real=False)
    for name, recorded in RECORD["classes"][path].items():
        assert signature(getattr(ours, name)) == recorded, name


def test_constants():
    assert {path: find(path, real=False) for path in RECORD["constants"]} == RECORD["constants"]


@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")
@pytest.mark.parametrize("path", sorted(RECORD["functions"]))
def test_record_is_horovods(path):
    if path.partition(":")[2] not in PASSED_ON:
        assert signature(find(path, real=True)) == RECORD["functions"][path]


@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")
def test_every_public_name_of_horovod_is_here():
    import hvdtrain.hvd as ours

    # Modules and helpers that happen to be visible there.
    internal = {"check_extension", "mpi_lib_v2"}
    real = importlib.import_module("horovod.torch")
    public = {name for name in dir(real) if not name.startswith("_")} - internal
    assert public - set(dir(ours)) == set()
