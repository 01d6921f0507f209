"""Names of parameters and buffers without what wrappers put in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.errors import CheckpointError

_COMPILED = "_orig_mod."  # torch.compile, anywhere in a name
_WRAPPED = "module."  # DistributedDataParallel and DataParallel, in front of every name


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with its bare form: `_orig_mod.` gone everywhere, `module.` gone where every name starts with it.

    A model with one submodule called `module` among others keeps that name: no wrapper looks like this.

    Raises:
        CheckpointError: two names have the same bare form.
    """
    given = list(names)
    bare = [name.replace(_COMPILED, "") for name in given]
    while bare and all(name.startswith(_WRAPPED) for name in bare):
        bare = [name.removeprefix(_WRAPPED) for name in bare]
    seen: dict[str, str] = {}
    for name, short in zip(given, bare, strict=True):
        if short in seen:
            raise CheckpointError(f"{seen[short]!r} and {name!r} are both {short!r} without the names of wrappers")
        seen[short] = name
    return dict(zip(given, bare, strict=True))


def strip_wrapper_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with bare names, in the same order."""
    return {short: state[name] for name, short in bare_names(state).items()}


def match_names(state: Mapping[str, Any], expected: Iterable[str]) -> dict[str, Any]:
    """`state` under the names that a model uses now, wrapped or not, for `model.load_state_dict`.

    Both sides are compared without the names of wrappers. Names that the model does not have stay as they are, so
    that `load_state_dict` reports them.
    """
    wanted = {short: name for name, short in bare_names(expected).items()}
    return {wanted.get(short, short): value for short, value in strip_wrapper_names(state).items()}
