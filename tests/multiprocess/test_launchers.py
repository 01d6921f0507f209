"""Case O: whatever starts the ranks and whichever backend reduces, the model is the same, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import launchers
import pytest

from hvdtrain.launch import free_port

BACKENDS = ["ddp", "horovod"]
STEPS = 6
LIMIT_S = 240.0
# What the summary calls the launcher. Open MPI leaves no trace of a horovodrun that called it, except where it says so.
NAMES = {
    "torchrun": {"torchrun"},
    "torch.distributed.launch": {"torchrun"},
    "horovodrun-gloo": {"horovodrun"},
    "horovodrun-mpi": {"horovodrun", "mpirun"},
    "mpirun": {"mpirun"},
}


def arguments(backend: str, output: Path, *extra: str) -> list[str]:
    settings = [f"--set={setting}" for setting in (f"max_steps={STEPS}", "eval.every_epochs=null", *extra)]
    return ["train", "examples/mnist/ddp.yaml", "--backend", backend, "--output", str(output), *settings]


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of two ranks under torchrun and ddp."""
    output = tmp_path_factory.mktemp("expected")
    process = launchers.start("torchrun", arguments("ddp", output))
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    return summary(output)["parameters_sha256"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launcher", list(launchers.LAUNCHERS))
def test_every_launcher_with_every_backend_gives_the_same_model(launcher, backend, expected, tmp_path):
    process = launchers.start(launcher, arguments(backend, tmp_path))
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    found = summary(tmp_path)
    assert (found["status"], found["backend"], found["steps"]) == ("done", backend, STEPS)
    assert found["launcher"] in NAMES[launcher]
    assert (found["world"]["size"], found["world"]["local_size"], found["world"]["num_nodes"]) == (2, 2, 1)
    assert found["ranks_agree"] is True
    assert found["parameters_sha256"] == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_started_by_hand_give_the_same_model(method, backend, expected, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/meeting"
    processes = launchers.start_by_hand(arguments(backend, tmp_path), url)
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    found = summary(tmp_path)
    assert (found["launcher"], found["parameters_sha256"]) == ("manual", expected)


def test_one_process_without_a_launcher_gives_the_same_model_under_both_backends(tmp_path):
    hashes = []
    for backend in BACKENDS:
        process = launchers.start_command([launchers.HVDTRAIN, *arguments(backend, tmp_path / backend)])
        text, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text
        found = summary(tmp_path / backend)
        assert (found["launcher"], found["world"]["size"]) == ("none", 1)
        hashes.append(found["parameters_sha256"])
    assert hashes[0] == hashes[1]
