"""The key-value server that `horovodrun --gloo` runs for its workers: PUT and GET /scope/key over plain HTTP.

Protocol: horovod/runner/http/http_server.py (KVStoreHandler) of Horovod 0.28.1. A key that is not there is a 404.
"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

from hvdtrain.errors import LaunchError
from hvdtrain.launch.store import Backoff, Deadline

SCOPE = "hvdtrain"


class HorovodrunServer:
    """A client of the server at host:port."""

    def __init__(self, host: str, port: int, who: str) -> None:
        self._where, self._who = f"{host}:{port}", who
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # The server is in the cluster: a proxy from the environment must not come in between.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def put(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Store a value.

        Raises:
            LaunchError: the server does not answer in time.
        """
        request = urllib.request.Request(f"{self._base}/{SCOPE}/{key}", data=value, method="PUT")
        self._until(deadline, lambda: self._opener.open(request, timeout=5).read())

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Wait for a value.

        Raises:
            LaunchError: it is not there in time.
        """
        value = self._until(deadline, lambda: self._opener.open(f"{self._base}/{SCOPE}/{key}", timeout=5).read())
        assert isinstance(value, bytes)
        return value

    def _until(self, deadline: Deadline, action: object) -> object:
        assert callable(action)
        backoff = Backoff()
        while True:
            try:
                return action()
            except urllib.error.HTTPError as error:
                reason = "rank 0 has not put its address there: missing: rank 0" if error.code == 404 else str(error)
            except (OSError, urllib.error.URLError) as error:
                reason = str(getattr(error, "reason", error))
            if deadline.over:
                raise LaunchError(
                    f"{self._who} on host {socket.gethostname()}: no answer from the server of horovodrun on "
                    f"{self._where} (HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT) within {deadline.seconds:g} s: {reason}"
                )
            backoff.sleep(deadline)
