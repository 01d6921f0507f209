"""Every key, its type, its default and its documentation."""

import subprocess
import sys

import pydantic
import pytest
import yaml

from hvdtrain.config import Config, OptimizerConfig, describe_keys, load_config
from hvdtrain.errors import ConfigError

DEFAULTS = {
    "task": "package.module:Task",
    "task_options": {},
    "backend": "ddp",
    "compression": "none",
    "precision": "fp32",
    "loss_scale": 65536.0,
    "device": "auto",
    "transport": "auto",
    "epochs": 3,
    "max_steps": None,
    "batch_size": 64,
    "accumulate": 1,
    "sync_every_microbatch": False,
    "shuffle": True,
    "clip_norm": None,
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    "lr": {"scaling": "none", "base_batch": 64, "warmup_steps": 0, "schedule": "constant"},
    "seed": 1,
    "num_workers": 0,
    "uneven_data": "fill",
    "eval": {"every_epochs": 1},
    "find_unused_parameters": False,
    "static_graph": False,
    "bucket_mb": 25.0,
    "compile": False,
    "stall_warning_s": 60.0,
    "stall_abort_s": 600.0,
    "start_timeout_s": 300.0,
    "network_interface": "auto",
    "log_every_steps": 10,
    "checkpoint": {"every_steps": 500, "keep": 3, "best": None},
    "output": "runs/job",
}


@pytest.fixture
def job(tmp_path):
    """Writes a job file and gives its path."""

    def write(text: str, name: str = "job.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_every_key_has_its_default(job):
    path = job("task: package.module:Task\n")
    assert load_config(path).to_dict() == DEFAULTS
    assert list(load_config(path).to_dict()) == list(DEFAULTS)


def test_output_is_named_after_the_file(job):
    assert load_config(job("task: a.b:C\n", "big.model.yaml")).output == "runs/big.model"
    assert Config(task="a.b:C").output == "runs/job"


def test_every_value_can_be_given(job):
    given = {
        "task": "package.module:Outer.Task",
        "task_options": {"data": "folder", "sizes": [1, 2], "deep": {"a": {"b": 1e-3}}},
        "backend": "horovod",
        "compression": "fp16",
        "precision": "fp16",
        "loss_scale": 1024.0,
        "device": "cpu",
        "transport": "mpi",
        "epochs": None,
        "max_steps": 7,
        "batch_size": None,
        "accumulate": 2,
        "sync_every_microbatch": True,
        "shuffle": False,
        "clip_norm": 1.0,
        "optimizer": {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "foreach": True},
        "lr": {"scaling": "none", "base_batch": 8, "warmup_steps": 5, "schedule": "cosine"},
        "seed": 0,
        "num_workers": 2,
        "uneven_data": "stop",
        "eval": {"every_epochs": None},
        "find_unused_parameters": True,
        "static_graph": True,
        "bucket_mb": 0.5,
        "compile": True,
        "stall_warning_s": 1.5,
        "stall_abort_s": 3.0,
        "start_timeout_s": 20.0,
        "network_interface": "eth0",
        "log_every_steps": 1,
        "checkpoint": {"every_steps": None, "keep": None, "best": {"metric": "accuracy", "mode": "max"}},
        "output": "somewhere/else",
    }
    assert list(given) == list(DEFAULTS)
    assert load_config(job(yaml.safe_dump(given))).to_dict() == given


def test_whole_numbers_serve_as_numbers(job):
    config = load_config(job("task: a.b:C\nclip_norm: 1\nbucket_mb: 4\noptimizer: {name: SGD, lr: 1}\n"))
    assert (config.clip_norm, config.bucket_mb, config.optimizer.lr) == (1.0, 4.0, 1.0)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"lr": 0.05, "momentum": 0.9}),
        ({"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}),
        ({"name": "SGD", "lr": 0.1}, {"lr": 0.1}),
        ({"name": "SGD"}, {}),
        ({"name": "Adam", "lr": None, "amsgrad": True}, {"amsgrad": True}),
        ({"name": "Adam", "lr": 0.001, "betas": [0.9, 0.99]}, {"lr": 0.001, "betas": [0.9, 0.99]}),
    ],
)
def test_optimizer_options_are_ours_without_a_name_and_torchs_with_one(given, options):
    assert OptimizerConfig.model_validate(given).options == options


def test_a_configuration_cannot_be_changed():
    config = Config(task="a.b:C")
    with pytest.raises(pydantic.ValidationError):
        config.epochs = 4


def test_reference_has_every_key_with_default_and_text():
    docs = {doc.key: doc for doc in describe_keys()}
    assert [key for key in docs if "." not in key] == list(DEFAULTS)
    assert {key for key, doc in docs.items() if doc.default is None} == {
        "task",
        "checkpoint.best.metric",
        "checkpoint.best.mode",
    }
    assert all(doc.text.endswith(".") for doc in docs.values())
    for key, value in DEFAULTS.items():
        if key != "task":
            assert yaml.safe_load(docs[key].default) == value
    assert docs["optimizer"].default == "{name: SGD, lr: 0.05, momentum: 0.9}"
    assert docs["batch_size"].accepts == "a whole number of at least 1, or null"
    assert docs["lr.schedule"].accepts == "one of constant, cosine, linear"


def test_the_module_prints_the_reference_without_torch():
    code = (
        "import sys, runpy; runpy.run_module('hvdtrain.config', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "\n  warmup_steps: 0    # a whole number of at least 0\n" in done.stdout


def test_an_error_found_later_names_the_line(job):
    path = job("task: a.b:C\noptimizer:\n  name: SGD\n  lr: 0.1\n  nestrov: true\n")
    config = load_config(path, ["lr.base_batch=8"])
    error = config.error("optimizer.nestrov", "SGD has no such option")
    assert isinstance(error, ConfigError)
    assert str(error) == f"{path}, line 5: optimizer.nestrov: SGD has no such option"
    assert str(config.error("lr.base_batch", "no")) == "--set lr.base_batch=8: lr.base_batch: no"
    assert str(config.error("device", "no CUDA here")) == f"{path}: device: no CUDA here"
    assert str(Config(task="a.b:C").error("device", "no CUDA here")) == "device: no CUDA here"
