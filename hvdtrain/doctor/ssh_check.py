"""ssh: what horovodrun and mpirun reach other hosts with; one host needs none."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from collections.abc import Mapping

from hvdtrain.doctor.finding import Finding, absent, ok, warn
from hvdtrain.horovod_build.run import run

_LOGIN_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class SshSeen:
    """`client`: ssh is on the PATH; `server`: something listens on its port; `login`: why a login fails, or empty."""

    client: bool
    server: bool
    login: str = ""


def probe_ssh(environ: Mapping[str, str], port: int = 22) -> SshSeen:
    """Look for the client and a server here, and if both are there try a login without a password."""
    ssh = shutil.which("ssh", path=environ.get("PATH", os.defpath))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            server = True
    except OSError:
        server = False
    if ssh is None or not server:
        return SshSeen(ssh is not None, server)
    # BatchMode: no question is asked, so nothing waits for an answer. The host's key is neither asked for nor kept.
    command = [ssh, "-p", str(port), "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "-o", "LogLevel=ERROR",
               "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "127.0.0.1", "true"]  # fmt: skip
    tried = run(command, limit_s=_LOGIN_LIMIT_S, environ=environ)
    return SshSeen(True, True, "" if tried.ok else tried.reason(_LOGIN_LIMIT_S))


def check_ssh(seen: SshSeen) -> list[Finding]:
    """Client, server, login without a password."""
    if not seen.client:
        cure = "to start on other hosts: apt-get install -y openssh-client"
        return [absent("ssh", "no ssh; one host, torchrun and srun do without", cure)]
    if not seen.server:
        cure = "to be started from another host: apt-get install -y openssh-server, and start sshd"
        return [absent("ssh", "ssh is here; no sshd listens on this host", cure)]
    if seen.login:
        cure = "for horovodrun and mpirun over several hosts: ssh-keygen, then ssh-copy-id HOST"
        return [warn("ssh", f"ssh and sshd are here; a login without a password fails: {seen.login}", cure)]
    return [ok("ssh", "ssh and sshd are here; a login without a password works")]
