"""Which variables travel."""

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.remote.environment import of_this_host, select


def test_what_travels_and_what_does_not():
    environ = {
        "PATH": "/opt/bin",
        "NCCL_DEBUG": "INFO",
        "HVDTRAIN_BACKEND": "horovod",
        "OMP_NUM_THREADS": "3",
        # This machine's, this process's, or nobody's business.
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "HOROVOD_RANK": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "RANK": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "HVDTRAIN_SSH_STATE": "/var/lib/x",
    }
    assert select(environ) == {
        "PATH": "/opt/bin",
        "NCCL_DEBUG": "INFO",
        "HVDTRAIN_BACKEND": "horovod",
        "OMP_NUM_THREADS": "3",
    }


def test_what_is_asked_for_travels_as_it_is():
    hard = 'it\'s "quoted" $HOME `date` \\ \n second line'
    environ = {"TOKEN": hard, "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}
    assert select(environ, ["TOKEN", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG=WARN", "NEW=a=b"]) == {
        "TOKEN": hard,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "WARN",
        "NEW": "a=b",
    }


def test_exported_shell_functions_stay():
    environ = {"BASH_FUNC_module%%": "() {  eval true\n}", "PYTHON_FN": "() { :; }", "HVDTRAIN_FN%%": "() { :; }"}
    assert select(environ) == {}


def test_ranks_here_keep_everything_else():
    environ = {
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "3",
        "RANK": "1",
        "MASTER_PORT": "1",
        "BASH_FUNC_f%%": "() { :; }",
    }
    assert of_this_host(environ) == {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [("MISSING", "-x MISSING: it is not set here; write -x MISSING=VALUE"), ("2=3", "-x 2=3: '2' is not")],
)
def test_wrong_names(word, sentence):
    with pytest.raises(LaunchError, match=sentence):
        select({}, [word])
