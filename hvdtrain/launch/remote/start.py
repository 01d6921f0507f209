"""From hosts and a command to a running job."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import EXIT_DONE, EXIT_FAILED
from hvdtrain.launch.remote.check import Facts, check_hosts, describe, facts_or_error
from hvdtrain.launch.remote.connection import Connection, drop
from hvdtrain.launch.remote.hosts import Share
from hvdtrain.launch.remote.job import END_LIMIT_S, RunningJob, to_stderr
from hvdtrain.launch.remote.output import Output
from hvdtrain.launch.remote.protocol import Job
from hvdtrain.launch.remote.ssh import SshOptions, command_for, interpreter

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job as the command line describes it.

    Args:
        shares: hosts and their ranks.
        environment: what every rank gets (environment.py).
        nics: interfaces asked for, separated by commas; None lets each host choose.
        output: folder for the ranks' output; None: the screen alone.
        python: the interpreter on the hosts.
    """

    shares: Sequence[Share]
    command: Sequence[str]
    environment: dict[str, str]
    ssh: SshOptions
    start_timeout_s: float
    nics: str | None = None
    output: str | None = None
    python: str = sys.executable
    verbose: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(share.num_ranks for share in self.shares)


def run(plan: Plan) -> int:
    """Check the hosts, start the job, wait for its end. The exit status of `hvdtrain launch`.

    Raises:
        LaunchError: a host cannot be used; nothing was started.
    """
    folder = str(Path.cwd())
    names = [share.host.name for share in plan.shares]
    findings = check_hosts(
        names,
        plan.ssh,
        python=plan.python,
        start_timeout_s=plan.start_timeout_s,
        say=to_stderr,
        folder=folder,
    )
    facts = facts_or_error(findings, plan.ssh)
    if plan.verbose:
        for finding in findings:
            to_stderr(describe(finding, plan.ssh))
    output = Output(plan.output, plan.size)
    try:
        status = RunningJob(_connect(plan, facts, folder, output), output).run()
    finally:
        output.close()
    if status == EXIT_DONE and output.error is not None:
        to_stderr(f"the ranks ended well, but not all that they wrote could be passed on: {output.error}")
        return EXIT_FAILED
    return status


def _connect(plan: Plan, facts: Sequence[Facts], folder: str, output: Output) -> list[Connection]:
    """An agent on every host, with its part of the job."""
    run_id = secrets.token_hex(8)
    connections: list[Connection] = []
    try:
        for share, host in zip(plan.shares, facts, strict=True):
            job = _job_of(plan, share, host, facts, folder, run_id)
            if plan.verbose:
                last = share.first_rank + share.num_ranks - 1
                way = f", {host.interface} {host.address}" if host.interface else ""
                output.say(f"{share.host.name}: ranks {share.first_rank} to {last}{way}")
            # -P: the working folder must not shadow modules of the agent; the ranks' own path is untouched.
            safe = ["-P"] if sys.version_info >= (3, 11) else []
            line = [*interpreter(plan.python), *safe, "-m", "hvdtrain.launch.remote.agent"]
            connections.append(Connection(share, command_for(share.host.name, line, plan.ssh), job))
    except BaseException:
        drop(connections, END_LIMIT_S)
        raise
    return connections


def _job_of(plan: Plan, share: Share, host: Facts, facts: Sequence[Facts], folder: str, run_id: str) -> Job:
    return Job(
        run_id=run_id,
        num_nodes=len(plan.shares),
        node_rank=share.node_rank,
        first_rank=share.first_rank,
        num_ranks=share.num_ranks,
        root_address=_root_address(facts),
        root_port=facts[0].port,
        folder=folder,
        environment={**_interfaces(plan, host), **plan.environment},
        command=list(plan.command),
        start_timeout_s=plan.start_timeout_s,
    )


def _root_address(facts: Sequence[Facts]) -> str:
    """How the hosts find rank 0's: by the name that the user gave it, which each resolves in its own way."""
    root = facts[0]
    if len(facts) == 1:
        return "127.0.0.1"
    if root.name in _LOOPBACK_NAMES:
        # To the others that name means themselves.
        return root.address or root.hostname
    return root.name


def _interfaces(plan: Plan, host: Facts) -> dict[str, str]:
    """Which interfaces the libraries use on this host: those asked for, or the one that leads to the others."""
    chosen = plan.nics or (host.interface if len(plan.shares) > 1 else None)
    if not chosen or chosen == "lo":
        return {}
    return {"NCCL_SOCKET_IFNAME": chosen, "GLOO_SOCKET_IFNAME": chosen}
