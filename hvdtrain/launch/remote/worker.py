"""Becomes one rank: output into the agent's pipes, a life that ends with the agent's, then the command itself.

Started by torchrun's agent as `python -I -S worker.py PIPES`; the standard library alone, quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys


def main() -> None:
    """Never returns: the process becomes the command in the file PIPES/command."""
    pipes = sys.argv[1]
    # Not from our own arguments: torchrun's agent replaces `$$` and `${local_rank}` in those.
    with open(f"{pipes}/command", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        command = json.load(file)
    local_rank = os.environ["LOCAL_RANK"]
    parent = os.getppid()
    # PR_SET_PDEATHSIG of prctl(2) is 1: an agent that is killed takes its ranks with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the agent ended before the rank began")
    for number, name in ((1, "out"), (2, "err")):
        pipe = os.open(f"{pipes}/{name}.{local_rank}", os.O_WRONLY)
        os.dup2(pipe, number)
        os.close(pipe)
    # Ranks have no standard input: the agent's is the launcher's line of orders.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # The first line tells the agent which process to watch.
    os.write(1, b"%d\n" % os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hvdtrain launch: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(2 if error.errno in (2, 13) else 1)


if __name__ == "__main__":
    main()
