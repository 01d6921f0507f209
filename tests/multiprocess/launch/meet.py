"""What one rank does in test_rendezvous.py: detect, meet (MEETINGS times), tell the result as one line of JSON."""

import json
import os
import sys
import time
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import ManualFlags, choose_device, detect, open_rendezvous, set_threads


def exchange_through_file(value: bytes | None) -> bytes:
    """Stands for a backend that is connected already (Horovod over MPI): hands rank 0's bytes to everybody."""
    path = Path(os.environ["EXCHANGE_FILE"])
    if value is not None:
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").rename(path)
    limit = time.monotonic() + 60
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    return path.read_bytes()


def main() -> int:
    flags = ManualFlags(**json.loads(os.environ.get("FLAGS", "{}")))
    time.sleep(float(os.environ.get("LATE_S", "0")))
    try:
        detected = detect(os.environ, flags)
        for meeting in range(int(os.environ.get("MEETINGS", "1"))):
            rendezvous = open_rendezvous(
                detected,
                interface=os.environ.get("INTERFACE", "auto"),
                timeout_s=float(os.environ.get("TIMEOUT_S", "60")),
                backend_exchange=exchange_through_file if "EXCHANGE_FILE" in os.environ else None,
            )
            world = rendezvous.world
            rendezvous.prefix("mine").set(f"key{world.rank}", f"{meeting}")
            texts = rendezvous.all_gather_text(f"{meeting}.{world.rank}")
            device = str(choose_device("auto", rendezvous))
            result = {
                "launcher": rendezvous.launcher,
                "place": [
                    world.rank,
                    world.size,
                    world.local_rank,
                    world.local_size,
                    world.node_rank,
                    world.num_nodes,
                ],
                "texts": texts,
                "keys": [rendezvous.prefix("mine").get(f"key{rank}").decode() for rank in range(world.size)],
                "interface": rendezvous.interface,
                "hosts": len({peer.host_id for peer in rendezvous.peers}),
                "address": rendezvous.address,
                "port": rendezvous.port,
                "device": device,
                "threads": set_threads(world, local_cpus=rendezvous.local_cpus),
            }
            rendezvous.close()
        # One write, or the lines of two ranks may run together.
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    except HvdtrainError as error:
        sys.stdout.write(f"ERROR {error}\n")
        return error.exit_status
    return 0


def run(environ: dict[str, str], output: str) -> None:
    """One rank in a process that was forked with torch already imported: starting Python anew costs seconds."""
    os.environ.clear()
    os.environ.update(environ)
    with Path(output).open("w", buffering=1) as sys.stdout:
        status = main()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
