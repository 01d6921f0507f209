"""A fingerprint of the parameters, the same whatever wraps the model and whichever backend trained it."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from hvdtrain.checkpoint.names import bare_names


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 (hex) over the parameters as contiguous little-endian float32, in the order of their bare names.

    `model` may be wrapped (`module.`, `_orig_mod.`). Buffers do not count. Copies to the host: not for every step.
    """
    parameters = dict(model.named_parameters())
    digest = hashlib.sha256()
    for _, name in sorted((bare, name) for name, bare in bare_names(parameters).items()):
        values = parameters[name].detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        digest.update((values if sys.byteorder == "little" else values.byteswap()).tobytes())
    return digest.hexdigest()
