"""Failure: one dead rank ends the whole job within seconds, and the last line on the screen says which and why.

    guard.py       the front: `Guard`                       record.py      `Failure`: who, how, where
    monitor.py     every rank's background thread           hub.py         rank 0's thread: watches, decides, tells
    pulse.py       signs of life, from processes of their own (pulse_process.py)
    wire.py        their messages                           verdict.py     which of several failures came first
    stall.py       operations that wait for others          stop.py        SIGTERM, SIGINT, SIGUSR1
    crash.py       last words of a crash                    postmortem.py  what the kernel knows about a dead process
    workers.py     data-loader workers                      ending.py      how a process ends

Nothing here uses a collective or imports torch: it has to work when those are what is broken.
"""

from hvdtrain.failure.guard import Guard
from hvdtrain.failure.record import Failure

__all__ = ["Failure", "Guard"]
