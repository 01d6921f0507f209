"""`hvdtrain bench overhead`: both kinds of loop run, and the output is JSON alone."""

import importlib.util
import json
import subprocess
import sys

import pytest

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


@pytest.mark.parametrize(
    "backend",
    ["ddp", pytest.param("horovod", marks=pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed"))],
)
def test_the_figures_of_one_backend(backend):
    command = ["bench", "overhead", "--backend", backend, "--model", "small", "--rounds", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *command], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert (result["rounds"], result["ranks"], row["backend"], row["model"]) == (2, 2, backend, "small")
    assert row["trainer_ms"] > 0
    assert row["raw_ms"] > 0
    # Medians of two rounds each: a ratio far from that of the medians would be of other figures.
    assert 0.1 < row["ratio"] < 10
    assert 0.1 < row["ratio_noise"] < 10
