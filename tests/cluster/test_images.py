"""What is in the images, and what is not."""

from __future__ import annotations

import subprocess

import pytest
from cluster_hosts import docker

IMAGES = ["hvdtrain:ddp", "hvdtrain:horovod"]


def shell(image, line, *options):
    done = subprocess.run(
        ["docker", "run", "--rm", "--init", *options, image, "bash", "-c", line],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _with_images(containers):
    pass


@pytest.mark.parametrize("image", IMAGES)
def test_no_key_is_baked_in(image):
    # Also in no layer below: nothing was ever added and removed again.
    status, text = shell(
        image,
        "find / -xdev \\( -name 'ssh_host_*' -o -name 'id_*' -name '*.pub' -o -name host_key \\) -type f",
        "--user",
        "root",
    )
    assert (status, text) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_ordinary_user_by_default(image):
    assert shell(image, "id -un; id -u; echo $HOME; touch /shared/x && ls /examples/mnist/ddp.yaml") == (
        0,
        "hvdtrain\n1000\n/home/hvdtrain\n/examples/mnist/ddp.yaml\n",
    )


def test_what_ddp_leaves_out():
    status, text = shell(
        "hvdtrain:ddp", "command -v mpirun horovodrun gcc; pip list 2>/dev/null | grep -i -E 'horovod|mpi4py'"
    )
    assert (status, text) == (1, "")


def test_what_horovod_has():
    status, text = shell("hvdtrain:horovod", "horovodrun --check-build; mpirun --version")
    assert status == 0
    for word in ("[X] PyTorch", "[X] MPI", "[X] Gloo", "Open MPI) 4."):
        assert word in text


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_horovodrun_on_one_machine(controller):
    status, text = shell("hvdtrain:horovod", f"horovodrun {controller} -np 4 -H localhost:4 hvdtrain world --json")
    assert status == 0, text
    assert text.count('"size": 4') == 4
    assert "Read -1, expected" not in text


def test_training_needs_no_privileges():
    """Two MPI ranks of one container exchange tensors through shared memory, without Open MPI's complaint."""
    script = "import horovod.torch as hvd, torch; hvd.init(); print(hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum)[0])"
    status, text = shell("hvdtrain:horovod", f"mpirun -np 2 python -c '{script}'", "--cap-drop", "ALL")
    assert status == 0, text
    assert text.count("tensor(2.)") == 2
    assert "Read -1, expected" not in text


@pytest.mark.parametrize("user", ["hvdtrain", "root"])
def test_both_users_train(user):
    train = "hvdtrain train /examples/mnist/ddp.yaml --set max_steps=1 --output /tmp/out"
    line = f"cd /shared && hvdtrain launch -np 1 {train}"
    status, text = shell("hvdtrain:ddp", line, "--user", user)
    assert status == 0, text


def test_images_exist_with_labels():
    titles = [
        docker("inspect", "-f", '{{index .Config.Labels "org.opencontainers.image.title"}}', image).strip()
        for image in IMAGES
    ]
    assert titles == ["hvdtrain, native PyTorch", "hvdtrain, Horovod"]
