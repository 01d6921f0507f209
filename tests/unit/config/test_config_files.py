"""config.yaml, YAML's corners, where a task's file is looked for, differences between two configurations."""

import pytest
import yaml

from hvdtrain.config import Config, differences, load_config


def test_round_trip_through_config_yaml(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "task: a.b:C\nbackend: horovod\noptimizer: {name: Adam, lr: 1e-5, betas: [0.9, 0.99]}\n"
        "task_options: {a: '1e-3', b: 1e-05, c: no, d: '010', e: '', f: null, g: 'true', h: .inf, i: '2024-01-02',\n"
        "  j: '1:30', k: 1e22, l: Grüße, m: '# not a comment', n: [1, [2, {x: y}]], o: '<<', p: '0o7', q: '1_0'}\n"
    )
    config = load_config(job, ["checkpoint.best={metric: acc, mode: max}"])
    assert config.task_options["c"] == "no"
    assert config.task_options["k"] == 1e22
    written = tmp_path / "config.yaml"
    config.dump_yaml(written)
    assert load_config(written) == config
    # Readers that follow YAML 1.1, as PyYAML does, see the same.
    assert yaml.safe_load(written.read_text()) == config.to_dict()
    assert list(yaml.safe_load(written.read_text()))[:3] == ["task", "task_options", "backend"]


def test_the_round_trip_keeps_torchs_own_learning_rate(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("task: a.b:C\noptimizer: {name: SGD}\n")
    load_config(job).dump_yaml(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").optimizer.options == {}


def test_anchors_and_merge_keys(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "task: a.b:C\ntask_options:\n  one: &one {x: 1, y: 2}\n  two: {<<: *one, y: 3}\n  three: {<<: [*one, {z: 4}]}\n"
    )
    assert load_config(job).task_options == {
        "one": {"x": 1, "y": 2},
        "two": {"x": 1, "y": 3},
        "three": {"x": 1, "y": 2, "z": 4},
    }


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_bytes(b"\xef\xbb\xbftask: a.b:C\r\nepochs: 2\r\n")
    assert load_config(job).epochs == 2


@pytest.mark.parametrize("task", ["package.module:Class", "module:Outer.Inner"])
def test_a_module_has_no_file(task):
    config = Config(task=task)
    assert config.task_file() is None
    assert (config.task_source, config.task_name) == tuple(task.split(":"))


def test_task_file_in_working_directory_then_beside_the_job_then_above(tmp_path, monkeypatch):
    here, jobs = tmp_path / "here", tmp_path / "repository" / "examples" / "jobs"
    here.mkdir()
    jobs.mkdir(parents=True)
    monkeypatch.chdir(here)
    job = jobs / "job.yaml"
    job.write_text("task: examples/task.py:Task\n")
    above = tmp_path / "repository" / "examples" / "task.py"
    above.touch()
    assert load_config(job).task_file() == above
    beside = jobs / "examples" / "task.py"
    beside.parent.mkdir()
    beside.touch()
    assert load_config(job).task_file() == beside
    nearest = here / "examples" / "task.py"
    nearest.parent.mkdir()
    nearest.touch()
    assert load_config(job).task_file() == nearest
    assert load_config(job, [f"task={above}:Task"]).task_file() == above


def test_differences_name_the_keys_that_differ():
    before = Config(task="a.b:C").to_dict()
    now = Config.model_validate(
        {
            "task": "a.b:C",
            "seed": 2,
            "lr": {"base_batch": 8},
            "optimizer": {"name": "SGD", "lr": 0.05, "nesterov": True},
            "checkpoint": {"best": {"metric": "a", "mode": "max"}},
        }
    ).to_dict()
    assert differences(before, before) == []
    assert differences(before, now) == [
        ("optimizer.momentum", 0.9, None),
        ("optimizer.nesterov", None, True),
        ("lr.base_batch", 64, 8),
        ("seed", 1, 2),
        ("checkpoint.best", None, {"metric": "a", "mode": "max"}),
    ]
    assert differences({"a": 1}, {"a": True}) == [("a", 1, True)]
