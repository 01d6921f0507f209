"""`hvdtrain launch`: start the ranks of a job on every host."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import click

from hvdtrain.errors import LaunchError


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Start a command on every host of a cluster, over ssh.",
)
@click.option("-np", "--num-proc", "num_ranks", type=int, default=None, help="Number of ranks; default: all slots.")
@click.option("-H", "--hosts", default=None, metavar="HOST:SLOTS,...", help="Hosts and slots: host1:4,host2:4.")
@click.option("-hostfile", "--hostfile", default=None, metavar="FILE", help="A host a line: host1 slots=4.")
@click.option("-p", "--ssh-port", "port", type=click.IntRange(1, 65535), default=None, help="ssh port of all hosts.")
@click.option("-i", "--ssh-identity-file", "identity_file", default=None, metavar="FILE", help="Private key for ssh.")
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    envvar="HOROVOD_START_TIMEOUT",
    metavar="SECONDS",
    help="How long a host that refuses or is silent is waited for, and the ranks for each other.",
)
@click.option(
    "--network-interfaces",
    "--network-interface",
    "nics",
    multiple=True,
    metavar="NAME,...",
    help="Interfaces for the ranks' traffic; default: the one that leads to rank 0's host.",
)
@click.option("--output-filename", "output", default=None, metavar="DIR", help="Also write DIR/rank.N/stdout, stderr.")
@click.option("--backend", type=click.Choice(["ddp", "horovod"]), default=None, help="For `train` and `exec`.")
@click.option("-x", "variables", multiple=True, metavar="NAME[=VALUE]", help="Give a variable to every rank.")
@click.option("--python", default=sys.executable, metavar="PATH", help="Interpreter on the hosts; default: this one.")
@click.option(
    "--launcher", type=click.Choice(["horovodrun", "mpirun"]), default=None, help="Print its command instead."
)
@click.option("--gloo", "controller", flag_value="gloo", default=None, help="For --launcher horovodrun.")
@click.option("--mpi", "controller", flag_value="mpi", help="For --launcher horovodrun.")
@click.option("--check-only", is_flag=True, help="Only tell for every host whether it can be used.")
@click.option("-v", "--verbose", is_flag=True, help="Show the hosts and their ranks.")
@click.option("--disable-cache", is_flag=True, hidden=True, help="horovodrun's; nothing is cached here.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    num_ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    port: int | None,
    identity_file: str | None,
    start_timeout: float,
    nics: tuple[str, ...],
    output: str | None,
    backend: str | None,
    variables: tuple[str, ...],
    python: str,
    launcher: str | None,
    controller: str | None,
    check_only: bool,
    verbose: bool,
    disable_cache: bool,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND once per rank: on this machine (-np 4), or on the hosts of -H or --hostfile, over ssh.

    Options are horovodrun's. Each host is checked first; torchrun's agent then starts its ranks. One rank that fails
    ends all, on every host; its failure is the last line. Ctrl-C asks the ranks to stop, a second one ends them.

    \b
    Exit status: 0 all ranks ended with 0; 1 a rank failed; 2 the input is wrong or a host cannot be used, nothing was
    started; 75 the ranks stopped on request.

    \b
    hvdtrain launch -np 2 hvdtrain train job.yaml
    hvdtrain launch -np 16 -H host1:4,host2:4,host3:4,host4:4 -p 12345 --backend horovod hvdtrain train job.yaml
    """
    from hvdtrain.launch.remote import compose, environment, start
    from hvdtrain.launch.remote.check import check_hosts, describe
    from hvdtrain.launch.remote.hosts import Host, allot, looks_like_hosts, parse_hosts, read_hostfile
    from hvdtrain.launch.remote.job import to_stderr
    from hvdtrain.launch.remote.ssh import SshOptions

    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile: both name the hosts; give one of them")
    if hosts is not None:
        named = parse_hosts(hosts)
    elif hostfile is not None:
        named = read_hostfile(hostfile)
    elif check_only and command:
        # hvdtrain-ssh check host1 host2
        named, command = parse_hosts(",".join(command)), ()
    else:
        named = [Host("localhost", 1 if num_ranks is None else max(num_ranks, 1))]
    # Before the slots are counted: those of the hosts after a blank would be missed.
    if command and looks_like_hosts(command[0]) and shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]} would be the command; hosts are separated by commas, without spaces: "
                          f"-H {','.join([*map(str, named), command[0]])}")  # fmt: skip
    shares = allot(named, num_ranks)
    ssh = SshOptions(port, _existing(identity_file))
    if check_only:
        findings = check_hosts(
            [host.name for host in named],
            ssh,
            python=python,
            start_timeout_s=start_timeout if _given("start_timeout") else 0.0,
            say=to_stderr,
        )
        for finding in findings:
            click.echo(describe(finding, ssh))
        return 2 if any(finding.fault for finding in findings) else 0
    if not command:
        raise LaunchError("no command to start; write it last: hvdtrain launch -np 2 hvdtrain train job.yaml")
    nic_list = ",".join(nics) or None
    size = sum(share.num_ranks for share in shares)
    if backend is not None:
        variables = (*variables, f"HVDTRAIN_BACKEND={backend}")
    if launcher is not None:
        given = environment.select({}, [word if "=" in word else f"{word}={_value(word)}" for word in variables])
        if launcher == "horovodrun":
            line = compose.horovodrun(
                named, size, ssh, command, start_timeout_s=start_timeout, nics=nic_list, output=output,
                verbose=verbose, controller=controller, names=given,
            )  # fmt: skip
        else:
            line = compose.mpirun(
                named, size, ssh, command, root=os.geteuid() == 0, nics=nic_list, output=output, names=variables
            )
        click.echo(shlex.join(line))
        return 0
    plan = start.Plan(
        shares=shares,
        command=command,
        environment=environment.select(os.environ, variables),
        ssh=ssh,
        start_timeout_s=start_timeout,
        nics=nic_list,
        output=output,
        python=python,
        verbose=verbose,
    )
    return start.run(plan)


def _existing(identity_file: str | None) -> str | None:
    if identity_file is not None and not os.path.isfile(identity_file):  # noqa: PTH113  (a str, as ssh takes it)
        raise LaunchError(f"-i {identity_file}: there is no such file; pass the private key, or leave -i out")
    return identity_file


def _given(parameter: str) -> bool:
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not None and source is not click.core.ParameterSource.DEFAULT


def _value(name: str) -> str:
    if name not in os.environ:
        raise LaunchError(f"-x {name}: it is not set here; write -x {name}=VALUE")
    return os.environ[name]
