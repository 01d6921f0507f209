"""Wrong input: exit status 2, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MNIST = Path(__file__).parents[3] / "examples" / "mnist" / "ddp.yaml"


def parity(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "parity", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "nothing.yaml: no such file"),
        ([MNIST, "--set", "optimzer.lr=1"], "optimizer"),
        ([MNIST, "--set", "compression=powersgd"], "powersgd"),
        ([MNIST, "--compression", "bf16"], "bf16"),
        ([MNIST, "--steps", "0"], "--steps"),
    ],
)
def test_wrong_input_is_status_2(arguments, said, tmp_path):
    ended = parity(*arguments, "--output", tmp_path / "out")
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not (tmp_path / "out").exists()
