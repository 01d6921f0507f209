"""Names without wrappers."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.checkpoint import bare_names, match_names
from hvdtrain.errors import CheckpointError


def test_wrappers_in_any_order_and_inner_compiled_modules():
    assert list(bare_names(["module._orig_mod.a.w", "module._orig_mod.b.w"]).values()) == ["a.w", "b.w"]
    assert list(bare_names(["_orig_mod.module.a.w"]).values()) == ["a.w"]
    assert list(bare_names(["a._orig_mod.w", "b.w"]).values()) == ["a.w", "b.w"]
    assert bare_names([]) == {}


def test_a_submodule_called_module_among_others_keeps_its_name():
    assert list(bare_names(["module.w", "head.w"]).values()) == ["module.w", "head.w"]
    assert list(bare_names(["module.module.w", "module.head.w"]).values()) == ["module.w", "head.w"]
    assert list(bare_names(["backbone.module.w"]).values()) == ["backbone.module.w"]


def test_names_that_would_collide_are_refused():
    with pytest.raises(CheckpointError, match=r"are both 'a\.w'"):
        bare_names(["a.w", "_orig_mod.a.w"])


def test_match_names_suits_wrapped_and_bare_models():
    class Holder(torch.nn.Module):
        """All its names begin with `module.` without any wrapper."""

        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

    for saved, model in (
        (torch.nn.Linear(2, 1), Holder()),
        (Holder(), Holder()),
        (Holder(), torch.nn.Linear(2, 1)),
        (torch.nn.DataParallel(torch.nn.Linear(2, 1)), torch.compile(torch.nn.Linear(2, 1))),
    ):
        state = saved.state_dict()
        model.load_state_dict(match_names(state, model.state_dict()))
        for old, new in zip(state.values(), model.state_dict().values(), strict=True):
            assert torch.equal(old, new)


def test_match_names_leaves_unknown_names_to_load_state_dict():
    model = torch.nn.Linear(2, 1)
    state = match_names({**model.state_dict(), "extra": torch.ones(1)}, model.state_dict())
    with pytest.raises(RuntimeError, match="extra"):
        model.load_state_dict(state)
