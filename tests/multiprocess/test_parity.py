"""`hvdtrain parity` on real ranks: what is the same passes, and what is not is found at its step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path(__file__).parent / "tasks" / "parity_tasks.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["batch_size=1", "shuffle=false", "optimizer={name: SGD, lr: 0.01}", "device=cpu", "epochs=2"]


def parity(folder, file, *arguments, sets=()):
    flags = [argument for pair in sets for argument in ("--set", pair)]
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "parity", str(file), "--output", str(folder), *arguments, *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture
def job(tmp_path):
    def write(name="Planted", **options):
        file = tmp_path / "job.yaml"
        file.write_text(f"task: {TASKS}:{name}\ntask_options: {json.dumps(options)}\n")
        return file

    return write


def certificate(folder):
    return json.loads((folder / "certificate.json").read_text())


@pytest.mark.parametrize(
    ("file", "batch_size"), [("mnist/ddp.yaml", 16), ("resnet/synthetic.yaml", 2)], ids=["mnist", "resnet18"]
)
def test_recipes_have_the_same_bits_under_both_backends(tmp_path, file, batch_size):
    ended = parity(tmp_path, EXAMPLES / file, sets=[f"batch_size={batch_size}"])
    assert ended.returncode == 0, ended.stderr
    found = certificate(tmp_path)
    assert found["passed"] is True
    (compared,) = found["comparisons"]
    assert (compared["first"], compared["second"], compared["tolerance"]) == ("ddp", "horovod", 1e-5)
    # Two ranks: a sum of two numbers has no order to differ in.
    assert compared["loss"] == {
        "largest_relative": 0.0,
        "largest_at_step": None,
        "first_step_that_differs": None,
        "first_step_beyond": None,
        "num_steps": 20,
    }
    assert compared["weights"]["num_differing"] == 0
    assert compared["same_parameters_sha256"] is True
    assert [run["ranks_agree"] for run in found["runs"]] == [True, True]
    assert [len(run["losses"]) for run in found["runs"]] == [20, 20]
    assert all(found["versions"][name] for name in ("torch", "horovod", "python"))
    assert "# Parity: passed" in (tmp_path / "certificate.md").read_text()


def test_a_planted_loss_is_found_at_its_step(tmp_path, job):
    """In a job of four steps: the certificate does not claim the twenty that are usual."""
    ended = parity(tmp_path, job(step=3), sets=[*SMALL, "epochs=1"])
    assert ended.returncode == 1, ended.stderr
    found = certificate(tmp_path)
    assert (found["job"]["steps"], found["job"]["steps_asked"]) == (4, 20)
    assert "), 4 steps (of 20 asked for: the job has no more) on 2 ranks" in (tmp_path / "certificate.md").read_text()
    assert found["passed"] is False
    (compared,) = found["comparisons"]
    loss = compared["loss"]
    assert (loss["first_step_that_differs"], loss["first_step_beyond"]) == (3, 3)
    assert loss["largest_relative"] == pytest.approx(1 - 1 / 1.001, rel=1e-2)
    assert "step 3" in ended.stdout
    assert "# Parity: FAILED" in (tmp_path / "certificate.md").read_text()


def test_a_planted_last_step_is_found_in_the_weights(tmp_path, job):
    """By a tolerance of 1e-5; a wide one lets it pass, and fp16 on the wire is compared too."""
    ended = parity(tmp_path, job(gradient_step=4, factor=1.01), "--steps", "4", sets=SMALL)
    assert ended.returncode == 1, ended.stderr
    (compared,) = certificate(tmp_path)["comparisons"]
    assert compared["loss"]["largest_relative"] == 0.0
    assert compared["weights"]["tensor"] == "w"
    assert compared["weights"]["num_differing"] == 1
    # w from 2: the gradient is mean(x) + w with mean(x) of the two ranks 1.5, 3.5, 5.5, 7.5; lr 0.01.
    w = 2.0
    for mean in (1.5, 3.5, 5.5):
        w -= 0.01 * (mean + w)
    last = 0.01 * (7.5 + w)
    assert compared["weights"]["largest_absolute"] == pytest.approx(0.01 * last, rel=1e-3)
    wide = ["--steps", "2", "--tolerance", "0.01", "--compression", "fp16", "--compression", "none", "--json"]
    ended = parity(tmp_path / "wide", job(gradient_step=2, factor=1.01), *wide, sets=SMALL)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == certificate(tmp_path / "wide")
    assert [(item["first"], item["second"]) for item in found["comparisons"]] == [
        ("ddp", "horovod"),
        ("ddp", "ddp fp16"),
        ("horovod", "horovod fp16"),
        ("ddp fp16", "horovod fp16"),
    ]


def test_a_run_that_fails_is_no_parity(tmp_path, job):
    ended = parity(tmp_path, job("Broken"), "--steps", "2", sets=SMALL)
    assert ended.returncode == 1
    assert "planted failure" in ended.stderr
    assert not (tmp_path / "certificate.json").exists()


def test_what_only_the_ranks_can_find_wrong_is_status_2(tmp_path, job):
    ended = parity(tmp_path, job(no_such_option=1), "--steps", "2", sets=SMALL)
    assert ended.returncode == 2
    assert "no_such_option" in ended.stderr
