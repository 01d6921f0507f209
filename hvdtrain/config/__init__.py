"""The job file: YAML to typed, validated values. Needs no torch."""

from hvdtrain.config.differences import differences
from hvdtrain.config.load import load_config
from hvdtrain.config.models import (
    BestConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LrConfig,
    OptimizerConfig,
)
from hvdtrain.config.reference import describe_keys

__all__ = [
    "BestConfig",
    "CheckpointConfig",
    "Config",
    "EvalConfig",
    "LrConfig",
    "OptimizerConfig",
    "describe_keys",
    "differences",
    "load_config",
]
