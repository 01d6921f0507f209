"""Tasks by name, and what is said about wrong ones."""

from __future__ import annotations

import textwrap

import pytest

from hvdtrain.config import load_config
from hvdtrain.errors import ConfigError
from hvdtrain.task import load_task

GOOD = """
    class Good:
        def __init__(self, size=1, *, name="x"):
            self.size = size
        def model(self): ...
        def train_dataset(self): ...
        def loss(self, model, batch): ...

    class NoLoss:
        def model(self): ...
        def train_dataset(self): ...

"""


@pytest.fixture
def load(tmp_path, request):
    """Write a task file of a name of its own, and a job file; load the task."""
    stem = f"task_{abs(hash(request.node.name))}"
    (tmp_path / f"{stem}.py").write_text(textwrap.dedent(GOOD))

    def load(task="Good", **keys):
        lines = [f"task: {stem}.py:{task}", *(f"{key}: {value}" for key, value in keys.items())]
        (tmp_path / "job.yaml").write_text("\n".join(lines) + "\n")
        return load_task(load_config(tmp_path / "job.yaml"))

    return load


def test_a_task_gets_its_options(load):
    assert load(task_options="{size: 7}").size == 7


def test_a_file_is_imported_once(load):
    assert type(load()) is type(load())


def test_a_class_that_is_not_there(load):
    with pytest.raises(ConfigError, match=r"job\.yaml, line 1: task: .*has no Goood; it defines Good, NoLoss"):
        load("Goood")


def test_options_that_the_class_does_not_take(load):
    with pytest.raises(ConfigError, match=r"job\.yaml, line 2: task_options: Good cannot be made.*'sise'"):
        load(task_options="{sise: 7}")


def test_a_method_that_is_missing(load):
    with pytest.raises(ConfigError, match=r"NoLoss lacks loss\(\), which every task has"):
        load("NoLoss")


def test_a_module_that_is_not_there(tmp_path):
    (tmp_path / "job.yaml").write_text("task: no_such_module_here:Task\n")
    with pytest.raises(ConfigError, match="there is no module no_such_module_here; to name a file"):
        load_task(load_config(tmp_path / "job.yaml"))


def test_an_error_inside_the_file_is_its_own(tmp_path):
    (tmp_path / "broken_task.py").write_text("import no_such_module_either\n")
    (tmp_path / "job.yaml").write_text("task: broken_task.py:Task\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        load_task(load_config(tmp_path / "job.yaml"))
