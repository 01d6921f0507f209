"""`--set`, `--backend` and `--output`."""

import pytest

from hvdtrain.config import load_config
from hvdtrain.errors import ConfigError


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "task: a.b:C\ntask_options: {data: x}\noptimizer: {name: SGD, lr: 0.05, momentum: 0.9}\ncompression: bf16\n"
    )
    return "job.yaml"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("epochs=5", "epochs", 5),
        ("epochs=null", "epochs", None),
        ("shuffle=false", "shuffle", False),
        ("optimizer.lr=1e-3", "optimizer.lr", 0.001),
        ("optimizer.lr=5E-1", "optimizer.lr", 0.5),
        ("optimizer.lr=1.5e3", "optimizer.lr", 1500.0),
        ("optimizer.lr=.5", "optimizer.lr", 0.5),
        ("optimizer.lr=2.", "optimizer.lr", 2.0),
        ("optimizer.betas=[0.9, 1e-1]", "optimizer.betas", [0.9, 0.1]),
        ("optimizer={name: Adam, lr: 1e-2}", "optimizer", {"name": "Adam", "lr": 0.01}),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0),
        ("checkpoint.best={metric: acc, mode: max}", "checkpoint.best", {"metric": "acc", "mode": "max"}),
        ("task_options.deep.er.still=no", "task_options.deep", {"er": {"still": "no"}}),
        ("task_options.n=010", "task_options.n", 10),
        ("task_options.n=0x1F", "task_options.n", 31),
        ("task_options.n=0o17", "task_options.n", 15),
        ("task_options.n=60_000", "task_options.n", 60000),
        ("task_options.n=-3", "task_options.n", -3),
        ("task_options.n=1:30", "task_options.n", "1:30"),
        ("task_options.n=2024-01-02", "task_options.n", "2024-01-02"),
        ("task_options.n='5'", "task_options.n", "5"),
        ("task_options.n=1e", "task_options.n", "1e"),
        ("task_options.n=a=b", "task_options.n", "a=b"),
        ("task_options.n=~", "task_options.n", None),
        ("task_options.n=-.inf", "task_options.n", float("-inf")),
        ("task=x.y:Z", "task", "x.y:Z"),
        ("output=runs/a b", "output", "runs/a b"),
    ],
)
def test_values_are_read_as_yaml(job, override, key, value):
    found = load_config(job, ["max_steps=9", override]).to_dict()
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_the_rest_of_a_mapping_stays(job):
    config = load_config(job, ["optimizer.lr=0.1", "checkpoint.best.metric=acc", "checkpoint.best.mode=min"])
    assert config.optimizer.options == {"lr": 0.1, "momentum": 0.9}
    assert config.checkpoint.model_dump() == {"every_steps": 500, "keep": 3, "best": {"metric": "acc", "mode": "min"}}


def test_later_ones_win_and_flags_win_over_all(job):
    config = load_config(
        job, ["seed=2", "seed=3", "backend=nccl", "compression=none", "output=x"], backend="horovod", output="runs/y"
    )
    assert (config.seed, config.backend, config.output) == (3, "horovod", "runs/y")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs", "--set epochs: expected KEY=VALUE, such as --set optimizer.lr=0.1"),
        ("=3", "--set =3: expected KEY=VALUE, such as --set optimizer.lr=0.1"),
        ("lr..x=3", "--set lr..x=3: expected KEY=VALUE, such as --set optimizer.lr=0.1"),
        ("epochs=", "--set epochs=: epochs: no value after `=`; write null for none"),
        ("epoch=3", "--set epoch=3: epoch: unknown key; did you mean epochs?"),
        ("lr.warmup=3", "--set lr.warmup=3: lr.warmup: unknown key; did you mean lr.warmup_steps?"),
        (
            "epochs=3x",
            "--set epochs=3x: epochs: must be a whole number of at least 1, or null, not '3x'",
        ),
        (
            "compression.kind=fp16",
            "--set compression.kind=fp16: compression.kind: compression is 'bf16', which has no keys beneath it",
        ),
        (
            "eval={every_epochs: 1, every_epochs: 2}",
            "--set eval={every_epochs: 1, every_epochs: 2}: eval: every_epochs: given twice; remove one",
        ),
        (
            "optimizer.betas=[1,",
            (
                "--set optimizer.betas=[1,: optimizer.betas: not valid YAML: expected the node content, but found "
                "'<stream end>'; write lists and mappings as [1, 2] and {a: 1}, in quotes"
            ),
        ),
    ],
)
def test_errors_name_the_override(job, override, expected):
    with pytest.raises(ConfigError) as caught:
        load_config(job, [override])
    assert str(caught.value) == expected


def test_errors_name_the_flag_or_the_line_that_has_to_change(job):
    with pytest.raises(ConfigError) as caught:
        load_config(job, backend="nccl")
    assert str(caught.value).startswith("--backend nccl: backend: nccl is a transport, not a backend")
    assert "--set transport=nccl" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(job, output="")
    assert str(caught.value) == "--output : output: must be text, not ''"
    with pytest.raises(ConfigError) as caught:
        load_config(job, backend="horovod")
    assert str(caught.value).startswith("job.yaml, line 4: compression: bf16 cannot be used with the horovod backend")
