"""Memory that is freed and allocated again, in processes of their own: the setting is for a whole process."""

import subprocess
import sys

import pytest

from hvdtrain.launch.memory import keep_freed_memory

# 60 MB in three pieces, again and again: 14,650 pages of 4 KiB each time.
WORK = """
import resource, torch
from hvdtrain.launch.memory import keep_freed_memory
torch.set_num_threads(1)
assert keep_freed_memory({})
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def fill():
    return [torch.ones(5_000_000) for _ in range(3)]
for _ in range(5):
    fill()
before = faults()
fill()
print(faults() - before)
"""


def faults_of_the_sixth_time():
    return int(subprocess.run([sys.executable, "-c", WORK], capture_output=True, check=True, text=True).stdout)


def test_a_later_allocation_finds_its_pages():
    # Without it the count is anything from 0 to all of them, by what happens to lie above.
    assert faults_of_the_sixth_time() < 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_setting_stays(name):
    assert keep_freed_memory({name: "glibc.malloc.trim_threshold=1"}) is False
