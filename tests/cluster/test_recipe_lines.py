"""The recipes on two hosts, as their READMEs start them, under both backends."""

from __future__ import annotations

import re

import pytest
from test_launch_lines import on_each

ONE_LINE = "num_nodes=2 master_addr=host1 hosts=host1:1,host2:1 ssh_port=12345 launcher={} bash /examples/{}/run.sh"
TORCHRUN = "torchrun --nproc_per_node=1 --nnodes=2 --node_rank={} --master_addr=host1 --master_port=1234"


def output_of(containers, launcher, recipe, options, *, each=None):
    """What the ranks print. torchrun is started by the line `each` on both hosts, the other launchers on the first."""
    lines = [each.format(node) for node in (0, 1)] if launcher == "torchrun" else [ONE_LINE.format(launcher, recipe)]
    ended = on_each(containers, [f"{line} {options}" for line in lines])
    text = "".join(one.text for one in ended)
    assert {one.status for one in ended} == {0}, text
    return text


def judge(summary, steps, backend):
    assert (summary["status"], summary["steps"], summary["ranks_agree"]) == ("done", steps, True)
    assert (summary["backend"], summary["world"]["num_nodes"]) == (backend, 2)


def test_message_passing(containers):
    ended = on_each(
        containers, [TORCHRUN.format(n) + " /examples/message_passing/main.py --backend=gloo" for n in (0, 1)]
    )
    assert [one.status for one in ended] == [0, 0], ended[0].text + ended[1].text
    assert "Rank 0 sent data to Rank 1 (host host2)" in ended[0].text
    assert "Rank 1 has received data from rank 0 (host host1)" in ended[1].text


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun", "hvdtrain"])
def test_message_passing_from_one_host(containers, launcher):
    text = output_of(containers, launcher, "message_passing", "--backend=gloo")
    assert "Rank 0 sent data to Rank 1 (host host2)" in text
    assert "Rank 1 has received data from rank 0 (host host1)" in text


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "gloo"), ("mpirun", "horovod")])
def test_resnet(containers, output, summary_of, launcher, backend):
    options = f"--backend={backend} --use_syn --arch=resnet18 --batch_size=4 --steps_syn=2 --num_epochs=2"
    options += f" --model_dir={output}"
    each = f"{TORCHRUN} /examples/resnet/main.py"
    text = output_of(containers, launcher, "resnet", options, each=each)
    assert len(re.findall(r"Local Rank: 0, Epoch: [01], Training \.\.\.", text)) == 4
    assert len(re.findall(r"num_steps_per_gpu: 2, avg_step_time: \d+\.\d{4}", text)) == 2
    judge(summary_of(output), 4, "ddp" if backend == "gloo" else "horovod")


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "ddp"), ("horovodrun", "horovod")])
def test_speech(containers, output, summary_of, launcher, backend):
    """A corpus of a few sentences, made on the hosts: the first test makes it, the second finds it."""
    data = f"{containers.shared}/asr"
    containers.run(f"[ -d {data}/wav ] || python /examples/asr/corpus.py --data {data} --train 24 --held_out 4")
    options = f"--data {data} --output {output} --backend {backend} --set epochs=null --set max_steps=2"
    options += " --set task_options.eval_splits=[]"
    each = "num_nodes=2 node_rank={} master_addr=host1 master_port=29517 bash /examples/asr/run.sh"
    text = output_of(containers, launcher, "asr", options, each=each)
    judge(summary_of(output), 2, backend)
    # Decoded as well: a CER of each split, however bad after two steps.
    assert len(re.findall(r"(?:dev|test), ctc greedy: CER \d+\.\d+%", text)) == 2
