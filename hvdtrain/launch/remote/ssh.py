"""The ssh command line, and what its failures mean."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class SshOptions:
    """How the hosts are reached. `port` None: what ssh's own configuration says, 22 at last."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout_s: int = 10


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a host cannot be used: what (a word, for programs) and a sentence. `passing`: trying again may help."""

    kind: str
    message: str
    passing: bool = False


def is_local(name: str) -> bool:
    """Whether a host name means this machine: we can listen on its address."""
    if name in ("localhost", "127.0.0.1", "::1"):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def command_for(name: str, remote: Sequence[str], options: SshOptions) -> list[str]:
    """A command line that runs `remote` on a host: never a prompt, host keys verified, silence noticed in 15 s.

    A host that is this machine needs no ssh.
    """
    if is_local(name):
        return list(remote)
    line = ["ssh", "-T"]
    for option in (
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        f"ConnectTimeout={options.connect_timeout_s}",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=2",
        "LogLevel=ERROR",
        # One connection of its own: a shared one would end with whoever opened it.
        "ControlPath=none",
    ):
        line += ["-o", option]
    if options.port is not None:
        line += ["-p", str(options.port)]
    if options.identity_file is not None:
        line += ["-i", options.identity_file, "-o", "IdentitiesOnly=yes"]
    return [*line, "--", name, shlex.join(remote)]


def interpreter(python: str) -> list[str]:
    """The words that run Python on a host with the caller's PYTHONPATH: a login has none of its own."""
    path = os.environ.get("PYTHONPATH")
    return ["env", f"PYTHONPATH={path}", python] if path else [python]


def place(name: str, options: SshOptions) -> str:
    """`host:port` for messages."""
    return f"{name}:{options.port or 22}"


def explain(name: str, status: int, stderr: str, options: SshOptions, python: str) -> Fault:
    """What an ssh that ended with `status` means, from what it and the remote shell wrote."""
    where = place(name, options)
    changed = re.search(r"Offending .*key in (\S+:\d+)", stderr)
    if "IDENTIFICATION HAS CHANGED" in stderr or changed:
        line = changed[1] if changed else "known_hosts"
        return Fault(
            "host key changed",
            f"{where}: its host key is not the one in {line}; if the host was made anew, remove that line "
            f"(or run `hvdtrain-ssh keys` again), else somebody answers in its place",
        )
    if "Host key verification failed" in stderr:
        return Fault(
            "host key unknown",
            f"{where}: its host key is in no known_hosts file; run `hvdtrain-ssh keys FOLDER {name}`, "
            f"or log in once by hand: ssh{_port(options)} {name}",
        )
    if "Could not resolve hostname" in stderr:
        return Fault("name", f"{name}: the name does not resolve here; check the spelling, /etc/hosts and DNS")
    if "Connection refused" in stderr:
        return Fault(
            "refused",
            f"{where}: refused; the host is there, but no sshd listens on that port: "
            f"start it (hvdtrain-ssh sshd --port {options.port or 22}) or pass the right -p",
            passing=True,
        )
    if "timed out" in stderr or "No route to host" in stderr or "Network is unreachable" in stderr:
        return Fault(
            "timed out",
            f"{where}: no answer within {options.connect_timeout_s} s; the host is down, the name resolves to a "
            "wrong address, or a firewall drops the packets",
            passing=True,
        )
    if "Permission denied" in stderr or "Too many authentication failures" in stderr:
        return Fault("authentication", f"{where}: authentication failed with {_keys(name, stderr, options)}")
    if status == 127 or ("No such file or directory" in stderr and python in stderr):
        return Fault(
            "interpreter", f"{name}: there is no {python}; install the same Python there, or pass --python PATH"
        )
    if status == 255:
        said = _last_line(stderr) or "the connection was closed"
        return Fault("closed", f"{where}: {said}", passing=True)
    return Fault("failed", f"{name}: {_last_line(stderr) or f'exit status {status}'}")


def _keys(name: str, stderr: str, options: SshOptions) -> str:
    broken = re.search(r'Load key "([^"]+)": (.*)', stderr)
    if broken:
        return f"{broken[1]} ({broken[2].strip()}); put the cluster's key there, mode 0600: hvdtrain-ssh install FOLDER"
    files = [options.identity_file] if options.identity_file else _configured_keys(name)
    if not files:
        return "no key: there is none under ssh's usual names; run hvdtrain-ssh install FOLDER, or pass -i FILE"
    return f"{', '.join(files)}; the host's authorized_keys does not hold it: hvdtrain-ssh install FOLDER on both sides"


def _configured_keys(name: str) -> list[str]:
    """The key files that ssh would offer, those that exist."""
    try:
        shown = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    files = [line.split(None, 1)[1] for line in shown.splitlines() if line.startswith("identityfile ")]
    return [file for file in files if Path(file).expanduser().exists()]


def _port(options: SshOptions) -> str:
    return "" if options.port is None else f" -p {options.port}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
