"""Asks every host at once whether it can take its ranks, and says what is wrong where."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.remote import probe
from hvdtrain.launch.remote.probe import identity
from hvdtrain.launch.remote.ssh import Fault, SshOptions, command_for, explain, interpreter, is_local, place

PACKAGES = ("hvdtrain", "torch")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a host said about itself (see probe.py). `address`, `interface`: its end of the way to the other hosts."""

    name: str
    hostname: str
    machine: str
    address: str | None
    interface: str | None
    port: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """The answer of one host: facts, or what is wrong."""

    name: str
    facts: Facts | None
    fault: Fault | None


def check_hosts(
    names: Sequence[str],
    options: SshOptions,
    *,
    python: str,
    start_timeout_s: float,
    say: Callable[[str], None],
    folder: str | None = None,
) -> list[Finding]:
    """Ask all hosts, in parallel; one that refuses or is silent is asked again until `start_timeout_s` is over.

    Args:
        names: the hosts, the first is rank 0's.
        python: the interpreter to look for there.
        say: told when a host is being waited for.
        folder: where the job is to run; None: not checked.
    """
    deadline = time.monotonic() + start_timeout_s
    given_up = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(32, len(names))) as pool:
        asked = [
            pool.submit(_ask_until, name, _peer_of(name, names), options, python, deadline, say, folder, given_up)
            for name in names
        ]
        try:
            findings = [one.result() for one in asked]
        except BaseException:
            # Ctrl-C: the pool waits for its threads, and they would go on asking.
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _two_names_of_one(findings)


def facts_or_error(findings: Sequence[Finding], options: SshOptions) -> list[Facts]:
    """The facts of all hosts.

    Raises:
        LaunchError: one line for each host that cannot be used.
    """
    faults = [finding.fault for finding in findings if finding.fault is not None]
    if faults:
        bad, total = len(faults), len(findings)
        lines = "".join(f"\n  {fault.message}" for fault in faults)
        raise LaunchError(f"{bad} of {total} host{'s' * (total != 1)} cannot be used; nothing was started{lines}")
    return [finding.facts for finding in findings if finding.facts is not None]


def describe(finding: Finding, options: SshOptions) -> str:
    """A line for people."""
    if finding.fault is not None:
        return f"{finding.name}: {finding.fault.kind}: {finding.fault.message}"
    assert finding.facts is not None
    way = "" if finding.facts.address is None else f", {finding.facts.interface} {finding.facts.address}"
    reached = "this machine" if is_local(finding.name) else place(finding.name, options)
    return f"{finding.name}: ok ({reached}, hostname {finding.facts.hostname}{way})"


def _peer_of(name: str, names: Sequence[str]) -> str | None:
    """Whom a host must reach: rank 0's host; rank 0's host itself, the second one."""
    if len(names) == 1:
        return None
    return names[1] if name == names[0] else names[0]


def _ask_until(
    name: str,
    peer: str | None,
    options: SshOptions,
    python: str,
    deadline: float,
    say: Callable[[str], None],
    folder: str | None,
    given_up: threading.Event,
) -> Finding:
    waiting = False
    start = time.monotonic()
    while True:
        limit_s = max(options.connect_timeout_s + 10.0, deadline - time.monotonic())
        finding = _ask(name, peer, options, python, folder, limit_s)
        left = deadline - time.monotonic()
        if finding.fault is None or not finding.fault.passing:
            return finding
        if left <= 0 or given_up.is_set():
            if waiting:
                waited = f"{finding.fault.message} (waited {time.monotonic() - start:.0f} s)"
                return Finding(name, None, dataclasses.replace(finding.fault, message=waited))
            return finding
        if not waiting:
            waiting = True
            say(f"waiting for {place(name, options)} ({finding.fault.kind}), {left:.0f} s at most")
        given_up.wait(min(1.0, left))


def _ask(name: str, peer: str | None, options: SshOptions, python: str, folder: str | None, limit_s: float) -> Finding:
    # As docker/ssh/hvdtrain-ssh has it; a host that is asked fills in its own name and home.
    state = os.environ.get("HVDTRAIN_SSH_STATE", "~/.hvdtrain-ssh/{hostname}")
    ours = identity(state)
    question: dict[str, Any] = {
        "packages": list(PACKAGES),
        "folder": folder or "/",
        "peer": peer,
        "state": state if ours else None,
    }
    source = (
        f"{inspect.getsource(probe)}\nimport json\nprint(json.dumps(probe(**json.loads({json.dumps(question)!r}))))\n"
    )
    try:
        done = subprocess.run(
            command_for(name, [*interpreter(python), "-"], options),
            input=source,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _bad(name, "timed out", f"{place(name, options)}: logged in, but no answer within {limit_s:.0f} s")
    except FileNotFoundError as error:
        return _bad(name, "interpreter", f"{error.filename} is not there; install it, or pass --python PATH")
    if done.returncode != 0:
        return Finding(name, None, explain(name, done.returncode, done.stderr, options, python))
    try:
        # A login script may print before it.
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return _bad(name, "failed", f"{name}: {python} answered with no report: {done.stdout.strip()[:200]!r}")
    return _judge(name, said, ours, peer, options, folder)


def _judge(
    name: str, said: dict[str, Any], ours: str | None, peer: str | None, options: SshOptions, folder: str | None
) -> Finding:
    where = place(name, options)
    if ours and (said["identity"] or "").split(" ")[0] != ours.split(" ")[0]:
        whose = f"of another cluster ({said['identity']})" if said["identity"] else "without a mark of this cluster"
        return _bad(
            name,
            "another sshd",
            f"{where}: another sshd answers, that of {said['hostname']}, a machine {whose}; is the port the "
            "container's own, and did `hvdtrain-ssh install` run there?",
        )
    python = ".".join(map(str, sys.version_info[:2]))
    if said["python"] != python:
        return _bad(name, "version", f"{name}: has Python {said['python']}, this host {python}; make them equal")
    for package in PACKAGES:
        here, there = _version(package), said["packages"][package]
        if there is None and here is not None:
            return _bad(name, "package", f"{name}: {package} is not installed there; this host has {package} {here}")
        if there != here:
            return _bad(name, "version", f"{name}: has {package} {there}, this host {here}; make them equal")
    if folder is not None and not said["folder"]:
        return _bad(name, "folder", f"{name}: there is no folder {folder}; a job runs in the same folder on every host")
    if said["peer_error"]:
        return _bad(name, "name", f"{name}: cannot find {peer} from there: {said['peer_error']}")
    facts = Facts(name, said["hostname"], said["machine"], said["address"], said["interface"], said["port"])
    return Finding(name, facts, None)


def _two_names_of_one(findings: list[Finding]) -> list[Finding]:
    """Two names that lead to one machine would get more ranks there than it has slots."""
    first: dict[str, str] = {}
    judged = []
    for finding in findings:
        if finding.facts is not None:
            other = first.setdefault(finding.facts.machine, finding.name)
            if other != finding.name:
                message = f"{finding.name}: is the same machine as {other}; name it once, with all its slots"
                finding = Finding(finding.name, None, Fault("twice", message))
        judged.append(finding)
    return judged


def _bad(name: str, kind: str, message: str) -> Finding:
    return Finding(name, None, Fault(kind, message))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
