"""The description of a collective call that the ranks compare."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.backends import signature


def rows(*calls: torch.Tensor) -> list[list[int]]:
    return [call.tolist() for call in calls]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (signature.encode("all_reduce", torch.ones(2, 3), op="max"), "all_reduce(float32[2, 3], op=max)"),
        (signature.encode("all_reduce", torch.tensor(1)), "all_reduce(int64[], op=sum)"),
        (signature.encode("all_gather", torch.ones(0, 3).bool()), "all_gather(bool[0, 3])"),
        (signature.encode("broadcast", torch.ones(1).half(), root=3), "broadcast(float16[1], root=3)"),
        (signature.encode("broadcast_object", root=2), "broadcast_object(root=2)"),
        (signature.encode("all_gather_object"), "all_gather_object()"),
        (signature.encode("barrier"), "barrier()"),
        (signature.encode("close"), "close()"),
    ],
)
def test_calls_in_words(call: torch.Tensor, text: str) -> None:
    assert call.dtype is torch.int64
    assert call.shape == (signature.LENGTH,)
    assert signature.describe(call.tolist()) == text


def test_many_dimensions_are_folded_but_still_compared() -> None:
    one, other = torch.ones([1] * 8 + [2, 3]), torch.ones([1] * 8 + [3, 3])
    assert signature.encode("all_reduce", one).tolist()[5:13] == [1] * 7 + [6]
    said = signature.disagreement(
        rows(signature.encode("all_reduce", one), signature.encode("all_reduce", other)), [0, 1]
    )
    assert said is not None
    ten, nine = torch.ones([1] * 10), torch.ones([1] * 9)
    said = signature.disagreement(
        rows(signature.encode("all_reduce", ten), signature.encode("all_reduce", nine)), [0, 1]
    )
    assert said is not None


def test_agreement_and_disagreement() -> None:
    a = signature.encode("all_reduce", torch.ones(2))
    b = signature.encode("all_reduce", torch.ones(2), op="min")
    assert signature.disagreement(rows(a, a, a), [0, 1, 2]) is None
    assert signature.disagreement(rows(a, b, a), [0, 4, 7]) == (
        "the ranks called different collectives: rank 0, 7: all_reduce(float32[2], op=sum); "
        "rank 4: all_reduce(float32[2], op=min)"
    )


def test_dim_0_is_free_in_an_all_gather_only() -> None:
    gathers = rows(*[signature.encode("all_gather", torch.ones(n, 3)) for n in (0, 5)])
    assert signature.disagreement(gathers, [0, 1]) is None
    assert signature.first_sizes(gathers) == [0, 5]
    broadcasts = rows(*[signature.encode("broadcast", torch.ones(n, 3)) for n in (0, 5)])
    assert signature.disagreement(broadcasts, [0, 1]) is not None
