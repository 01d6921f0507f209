"""`hvdtrain exec`: unchanged scripts under every launcher, failures, stalls, the examples."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from script_ranks import run_commands

from hvdtrain.launch import free_port

EXAMPLES = Path(__file__).parents[3] / "examples" / "horovod"
EXEC = [sys.executable, "-m", "hvdtrain", "exec"]
TORCHRUN = ["torchrun", "--standalone", "--no-python", "--nproc-per-node", "2"]
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "horovodrun": ["horovodrun", "-np", "2", "--gloo"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"],
}
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None

PLACE = """
import os, sys
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
words = ["RANK", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.__name__, total.tolist(), *sys.argv[1:]]
# In one piece: the ranks share the pipe.
sys.stdout.write(" ".join(map(str, words)) + "\\n")
sys.stdout.flush()
hvd.barrier()
"""


def run(command, script=None, *arguments, limit_s=100, **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", **environ}
    command = [*command, *([str(script)] if script else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=env)


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def lines(output, mark):
    return sorted(line[line.index(mark) :] for line in output.splitlines() if mark in line)


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_a_script_runs_unchanged_under(launcher, script):
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"{launcher} is not installed")
    done = run([*LAUNCHERS[launcher], *EXEC], script(PLACE), "--lr", "0.1", "-x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done.stdout, "RANK") == [
        f"RANK {rank} 2 {rank} hvdtrain.hvd [2.0, 2.0, 2.0] --lr 0.1 -x" for rank in range(2)
    ]


def test_alone_it_is_one_rank(script):
    done = run(EXEC, script(PLACE))
    assert lines(done.stdout, "RANK") == ["RANK 0 1 0 hvdtrain.hvd [1.0, 1.0, 1.0]"], done.stderr


@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")
@pytest.mark.parametrize("launcher", ["horovodrun", "torchrun"])
def test_the_real_horovod_on_request_under(launcher, script):
    done = run([*LAUNCHERS[launcher], *EXEC, "--backend", "horovod"], script(PLACE))
    assert lines(done.stdout, "RANK") == [f"RANK {r} 2 {r} horovod.torch [2.0, 2.0, 2.0]" for r in range(2)]
    assert done.returncode == 0, done.stderr


def test_modules_and_horovods_variables(script, tmp_path):
    # In one piece: the ranks share the pipe.
    words = "' '.join(map(str, ['VAR', os.environ['HOROVOD_RANK'], h.rank(), __name__]))"
    script(f"import os, sys, horovod.torch as h; h.init(); sys.stdout.write({words} + chr(10))")
    done = run(
        [*TORCHRUN, *EXEC, "-m", "train"], PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    assert lines(done.stdout, "VAR") == ["VAR 0 0 __main__", "VAR 1 1 __main__"], done.stderr


def test_a_missing_script_is_the_users_error():
    done = run(EXEC, "nowhere.py")
    assert done.returncode == 2
    assert f"exec nowhere.py: no such file in {Path.cwd()}" in done.stderr


def test_horovodruns_elastic_mode_says_what_to_use(script):
    done = run(EXEC, script(PLACE), HOROVOD_ELASTIC="1")
    assert done.returncode == 2
    assert "torchrun --nnodes MIN:MAX --max-restarts N" in done.stderr


def test_a_killed_rank_is_named_to_the_others(script, tmp_path):
    """Ranks started by hand: a launcher would end rank 0 as well, perhaps before it has said a word."""
    text = """
import os, signal, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    hvd.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
try:
    hvd.allreduce(torch.ones(1), name="last")
except hvd.HorovodInternalError as error:
    print("ERROR", error, flush=True)
"""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [{**meeting, "RANK": str(rank)} for rank in range(2)]
    ended = run_commands([[*EXEC, str(script(text))]] * 2, tmp_path, environs=environs, limit_s=100)
    assert ended[1].status == -signal.SIGKILL
    expected = "the connection to rank 1 broke: that process has ended, or its host is out of reach"
    assert lines(ended[0].out, "ERROR") == [f"ERROR allreduce.last: {expected}"]


def test_a_tensor_that_one_rank_never_submits_is_reported_and_given_up(script):
    text = """
import time, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    try:
        hvd.allreduce(torch.ones(1), name="lonely")
    except hvd.HorovodInternalError as error:
        print("ERROR", error, flush=True)
else:
    time.sleep(5)
hvd.barrier()
"""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    done = run([*TORCHRUN, *EXEC], script(text), **limits)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[hvd\] stalled: allreduce.lonely: rank 0 submitted it \d s ago, rank 1 did not", done.stderr)
    (error,) = lines(done.stdout, "ERROR")
    assert re.fullmatch(r"ERROR allreduce.lonely: rank 0 submitted it \d s ago, rank 1 did not \(HOROVOD_.*\)", error)


def test_a_step_that_one_rank_does_not_take_is_reported(script):
    text = """
import time, torch, horovod.torch as hvd
hvd.init()
layer = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
for step in range(3):
    if step == 2 and hvd.rank() == 1:
        time.sleep(6)
    optimizer.zero_grad()
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print("DONE", flush=True)
"""
    done = run([*TORCHRUN, *EXEC], script(text), HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    assert lines(done.stdout, "DONE") == ["DONE"] * 2, done.stderr
    assert re.search(r"DistributedOptimizer \S+: rank 0 wait for step 1, which rank 1 did not reach", done.stderr)


@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")
def test_mnist_has_the_same_loss_under_both():
    losses = {}
    for backend in ("ddp", "horovod"):
        command = [*LAUNCHERS["horovodrun"], *EXEC, "--backend", backend]
        done = run(command, EXAMPLES / "mnist.py", "--epochs", "1", limit_s=200)
        (found,) = re.findall(r"test loss (\d+\.\d+)", done.stdout)
        losses[backend] = float(found)
    assert losses["ddp"] == pytest.approx(losses["horovod"], abs=1e-5)


def test_the_synthetic_benchmark_prints_what_horovods_users_expect():
    done = run(
        [*TORCHRUN, *EXEC], EXAMPLES / "synthetic_benchmark.py", "--num-iters", "2", "--num-batches-per-iter", "2"
    )
    assert re.search(r"^Total img/sec on 2 rank\(s\): \d+\.\d \+-\d+\.\d$", done.stdout, re.MULTILINE), done.stderr


def test_elastic_training_continues_from_the_last_commit(tmp_path):
    command = [
        "torchrun", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python",
        "--nproc-per-node", "2", "--max-restarts", "2",
    ]  # fmt: skip
    once = tmp_path / "killed"
    done = run([*command, *EXEC], EXAMPLES / "elastic.py", "--kill-once", str(once), HVDTRAIN_ELASTIC_DIR=str(tmp_path))
    assert once.exists()
    assert done.returncode == 0, done.stderr
    begins = re.findall(r"begins at epoch (\d), batch (\d)", done.stdout)
    # Killed in the first batch of epoch 2; committed at the end of epoch 1.
    assert begins == [("0", "0"), ("2", "0")]
    assert "done: epoch 4, loss 0.0000" in done.stdout
