"""Reading Slurm's variables: lists of hosts, tasks per node, and whether this is a job step at all.

Source of the formats: the manual pages of srun ("OUTPUT ENVIRONMENT VARIABLES") and scontrol ("hostlist").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdtrain.errors import LaunchError

# The number that Slurm gives to the shell of `salloc` under LaunchParameters=use_interactive_step.
INTERACTIVE_STEP = "4294967290"
SHELLS = ("bash", "sh", "zsh", "csh", "tcsh", "fish")


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on each node of the step, in node order: `"2(x3),1"` is `[2, 2, 2, 1]`.

    Raises:
        LaunchError: the text is not in Slurm's format.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f'SLURM_STEP_TASKS_PER_NODE={text!r} is not in Slurm\'s format, such as "2(x3),1"')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(node_list: str) -> str:
    """The first host of a Slurm host list: `"n[01-03,07],m5"` is `n01`.

    Raises:
        LaunchError: the list is empty or a bracket is not closed.
    """
    # Only the first item counts: cut at the first comma outside brackets, then take the low end of every bracket.
    depth, item = 0, ""
    for character in node_list.strip():
        if character == "," and depth == 0:
            break
        depth += (character == "[") - (character == "]")
        item += character
    if depth != 0 or not item:
        raise LaunchError(f'SLURM_STEP_NODELIST={node_list!r} is not in Slurm\'s format, such as "n[01-03,07]"')
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", item)


def is_job_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of a job, and not a batch script or an interactive shell.

    The body of a batch script has SLURM_PROCID=0 and the whole job's SLURM_NTASKS, and so has a shell from
    `srun --pty bash`: a program started there stands alone, however many tasks were reserved.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step == INTERACTIVE_STEP:
        return False
    if step is None and "SLURM_STEP_NUM_TASKS" not in environ and environ.get("ENVIRONMENT") == "BATCH":
        return False
    in_shell = environ.get("SLURM_JOB_NAME") in SHELLS and step in (None, "0")
    # `srun -n 2 bash script.sh` has the same job name, but no terminal, and more than one task in its step.
    alone = "SLURM_PTY_PORT" in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    return not (in_shell and alone)
