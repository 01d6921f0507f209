"""Checkpoints: one plain file per step, written and read by rank 0 alone.

Nothing here communicates or knows the trainer. The format is plain enough for `torch.load(weights_only=True)`.
"""

from hvdtrain.checkpoint.best import BestRule
from hvdtrain.checkpoint.config_changes import config_differences, refuse_changed
from hvdtrain.checkpoint.names import bare_names, match_names, strip_wrapper_names
from hvdtrain.checkpoint.plain import plain
from hvdtrain.checkpoint.rng import rng_state, set_rng_state
from hvdtrain.checkpoint.store import CheckpointStore, Found, load

__all__ = [
    "BestRule",
    "CheckpointStore",
    "Found",
    "bare_names",
    "config_differences",
    "load",
    "match_names",
    "plain",
    "refuse_changed",
    "rng_state",
    "set_rng_state",
    "strip_wrapper_names",
]
