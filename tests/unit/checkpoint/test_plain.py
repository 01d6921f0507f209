"""Reducing a state to what weights_only accepts."""

from __future__ import annotations

import collections
import enum
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import plain
from hvdtrain.errors import CheckpointError


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Path("/a/b"), "/a/b"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Point(1, 2), (1, 2)),
        (torch.Size([2, 3]), (2, 3)),
        (bytearray(b"ab"), b"ab"),
        ({np.int64(1): {(np.int64(2), "x"): None}}, {1: {(2, "x"): None}}),
        ({1, 2}, {1, 2}),
        (-(2**70), -(2**70)),
        (1 + 2j, 1 + 2j),
    ],
)
def test_plain_counterparts(given, expected):
    def exact_types(value):
        assert type(value) in (type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set)
        if isinstance(value, dict):
            for pair in value.items():
                exact_types(pair)
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                exact_types(item)

    result = plain(given)
    assert result == expected
    exact_types(result)
    assert reread(result) == expected


def reread(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_numpy_arrays_become_tensors():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2]
    result = plain({"a": array, "scalar": np.array(2.5)})
    assert torch.equal(result["a"], torch.tensor([[0.0, 2.0], [3.0, 5.0]]))
    assert result["scalar"].shape == ()
    array[0, 0] = 9
    assert result["a"][0, 0] == 0


def test_tensors_lose_gradient_and_parameter_class():
    result = plain(torch.nn.Parameter(torch.ones(2)))
    assert type(result) is torch.Tensor
    assert not result.requires_grad


def test_a_view_does_not_drag_its_storage():
    big = torch.arange(1_000_000.0)
    result = plain({"head": big[:10], "strided": big[::100_000], "expanded": torch.ones(1).expand(1000)})
    assert torch.equal(result["head"], torch.arange(10.0))
    assert torch.equal(result["strided"], big[::100_000])
    assert torch.equal(result["expanded"], torch.ones(1000))
    assert result["head"].untyped_storage().nbytes() == 40
    buffer = io.BytesIO()
    torch.save(result, buffer)
    assert buffer.tell() < 10_000


def test_tied_weights_are_stored_once():
    weight = torch.zeros(100, 100)
    views = torch.zeros(20_000)[:10_000]
    result = plain({"a": weight, "b": weight.detach(), "c": views, "d": views[:]})
    assert result["a"].data_ptr() == result["b"].data_ptr()
    assert result["c"].data_ptr() == result["d"].data_ptr()
    # Equal addresses do not tie what has another type or shape.
    bits = plain({"f": weight, "i": weight.view(torch.int32), "flat": weight.view(-1)})
    assert bits["i"].dtype == torch.int32
    assert bits["flat"].shape == (10_000,)


def test_memory_format_and_special_tensors_survive():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.eye(3).to_sparse()
    result = reread(
        plain({"image": image, "sparse": sparse, "bf16": torch.ones(2, dtype=torch.bfloat16), "0d": image.sum()})
    )
    assert result["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result["image"], image)
    assert torch.equal(result["sparse"].to_dense(), torch.eye(3))
    assert result["bf16"].dtype == torch.bfloat16
    assert torch.equal(result["0d"], image.sum())
    conjugate = torch.view_as_complex(torch.randn(3, 2)).conj()
    assert torch.equal(reread(plain(conjugate)), conjugate)


def test_nan_stays_nan():
    assert math.isnan(plain({"x": np.float64("nan")})["x"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": [0, {"b": lambda: 0}]}, r"state\['a'\]\[1\]\['b'\] is a builtins.function"),
        ({"a": {object(): 1}}, r"a key of state\['a'\] is a builtins.object"),
        ({"d": np.datetime64("2020-01-01")}, "is a datetime.date"),
        ({"s": np.array(["a"])}, r"state\['s'\] is a numpy array of <U1"),
        ({"l": np.longdouble(1)}, "is a numpy longdouble|is a numpy float128"),
        ({"m": torch.empty(2, device="meta")}, "without data"),
        ({"i": 2**3000}, "an int of 3001 bits"),
        ({"t": torch.float32}, "is a torch.dtype"),
    ],
)
def test_what_has_no_plain_form_is_named(given, message):
    with pytest.raises(CheckpointError, match=message):
        plain(given)


def test_a_state_that_contains_itself():
    loop: dict = {}
    loop["loop"] = loop
    with pytest.raises(CheckpointError, match="contains itself"):
        plain(loop)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "LBFGS"])
def test_optimizer_and_scheduler_states_survive(name):
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        if name in ("SGD", "Adam")
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    for scheduler in schedulers[:3]:
        scheduler.step()
    saved = reread(plain({"o": optimizer.state_dict(), "s": [scheduler.state_dict() for scheduler in schedulers]}))
    other = getattr(torch.optim, name)(torch.nn.Linear(3, 2).parameters(), lr=1.0)
    other.load_state_dict(saved["o"])
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    schedulers[0].load_state_dict(saved["s"][0])
    schedulers[0].step()
    schedulers[2].load_state_dict(saved["s"][2])
