"""`hvdtrain world` as a person and a script see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

BARE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=60, check=False)


def test_json_alone() -> None:
    place = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node_rank": 0, "num_nodes": 1}
    assert json.loads(run("world", "--json").stdout) == {"launcher": "none", "world": place}


def test_unknown_fields_are_null() -> None:
    world = json.loads(run("world", "--json", **BARE).stdout)["world"]
    assert world == {"rank": 1, "size": 2, "local_rank": None, "local_size": None, "node_rank": None, "num_nodes": None}


def test_human_block() -> None:
    result = run("world", **BARE)
    assert result.stdout.splitlines() == [
        "launcher    manual",
        "rank        1 of 2",
        "local rank  unknown before the ranks meet",
        "node rank   unknown before the ranks meet",
        "meeting     rank 0 listens on node1:1234",
    ]


def test_half_set_is_status_2_and_one_line() -> None:
    result = run("world", RANK="1")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "RANK is set but WORLD_SIZE is not" in result.stderr


def test_local_rank_before_the_subcommand() -> None:
    """Where torch.distributed.launch puts it."""
    for spelling in ("--local-rank=0", "--local_rank=0"):
        world = json.loads(run(spelling, "world", "--json", **BARE).stdout)["world"]
        assert world["local_rank"] == 0


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['hvdtrain', 'world']\n"
        "from hvdtrain.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines()[-1] == "False False"
