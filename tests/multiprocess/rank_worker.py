"""One long-lived rank: connects once, then runs the functions that the test sends it. Started by rank_pool.py."""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Client

import cloudpickle

import hvdtrain
from hvdtrain.backends import ConnectOptions, make_backend
from hvdtrain.launch import ManualFlags


def main() -> None:
    address, kind, rank, size, meeting = sys.argv[1:]
    connection = Client(address)
    connection.send(int(rank))
    name, hvd = ("horovod", importlib.import_module("hvdtrain.hvd")) if kind == "hvd" else (kind, None)
    options = ConnectOptions(
        device="cpu",
        flags=ManualFlags(f"file://{meeting}", int(rank), int(size)),
        start_timeout_s=60,
        stall_warning_s=30,
        stall_abort_s=60,
    )
    backend = make_backend(name, options, hvd)
    backend.start()
    connection.send("ready")
    while True:
        request = connection.recv()
        if request is None:
            break
        function, args, kwargs = cloudpickle.loads(request)
        try:
            answer = (True, function(backend, *args, **kwargs))
        except BaseException as error:
            # The error itself may not pickle; its text always does.
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        connection.send(cloudpickle.dumps(answer))
    backend.close()
    connection.send("closed")


if __name__ == "__main__":
    assert hvdtrain.__version__
    main()
