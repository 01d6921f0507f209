"""A proof that failed says why, in one line; and it inherits nothing of the job that it is started in."""

import pytest

from hvdtrain.horovod_build.proof import clean_environ, what_failed
from hvdtrain.horovod_build.run import Finished, run


@pytest.mark.parametrize(
    ("status", "stderr", "expected"),
    [
        (
            1,
            'Traceback (most recent call last):\n  File "<string>", line 5\nAssertionError: hvd.size() is 1\n',
            "AssertionError: hvd.size() is 1",
        ),
        (
            1,
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] no lo\n",
            "[enforce fail] no lo",
        ),
        (1, "------------\nThere are not enough slots\n---------\n", "There are not enough slots"),
        (1, "", "exit status 1"),
        (-11, "", "killed by SIGSEGV"),
        (None, "ValueError: of a process that we killed", "no answer within 9 s"),
    ],
)
def test_the_line_that_says_why(status, stderr, expected):
    assert what_failed(Finished(status, "", stderr), 9.0) == expected


def test_no_launcher_is_inherited():
    job = {"RANK": "1", "HOROVOD_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_PROCID": "3", "MASTER_PORT": "1"}
    assert clean_environ({**job, "PATH": "/bin"}) == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}


def test_a_program_past_its_limit_is_ended_with_its_children():
    done = run(["sh", "-c", "sleep 60 & sleep 60"], limit_s=0.3)
    assert done.status is None
    assert done.reason(0.3) == "no answer within 0 s"
    assert run(["/no/such/program"], limit_s=5).reason(5) == "/no/such/program: No such file or directory"
