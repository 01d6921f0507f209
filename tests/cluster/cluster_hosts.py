"""Hosts for the tests: real containers, or network namespaces of this machine where there is no container engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = 12345


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command on a host ended. `text`: stdout and stderr as they came."""

    status: int
    text: str
    seconds: float

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else ""


class Running:
    """A command on a host, with what it has said so far."""

    def __init__(self, words: Sequence[str]) -> None:
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, word: str, times: int = 1, limit_s: float = 120) -> None:
        """Wait until so many lines with `word` have come."""
        deadline = time.monotonic() + limit_s
        while sum(word in line for line in list(self.lines)) < times:
            if time.monotonic() > deadline or (self.process.poll() is not None and not self._reader.is_alive()):
                self._kill()
                raise AssertionError(f"{word!r} did not come {times} times; it said:\n{self.text}")
            time.sleep(0.05)

    def finish(self, limit_s: float) -> Ended:
        """Wait for the end; a command that is not over in time, counted from now, fails the test with what it said."""
        begin = time.monotonic()
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._kill()
            raise AssertionError(f"not over within {limit_s:.0f} s; it said:\n{self.text}") from None
        self._reader.join(10)
        return Ended(status, self.text, time.monotonic() - begin)

    @property
    def text(self) -> str:
        return "".join(list(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)


class Hosts:
    """A cluster. `kind`: containers or namespaces. `shared`: a folder that all hosts see, as seen from them."""

    kind = ""
    shared = ""
    # What a path of the job starts with on the hosts.
    python = ""
    # Where `hvdtrain-ssh` keeps a host's files, for a shell there.
    ssh_state = ""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def inside(self, host: str, environ: dict[str, str], tty: bool = False) -> list[str]:
        """The words that put a command onto a host."""
        raise NotImplementedError

    def processes(self, host: str) -> list[str]:
        """The command lines of what a job has left on a host."""
        raise NotImplementedError

    def cut(self, host: str) -> None:
        """Take a host off the network."""
        raise NotImplementedError

    def join(self, host: str) -> None:
        """Put it back."""
        raise NotImplementedError

    def add_interface(self, host: str, name: str, address: str) -> None:
        """Give a host another interface, a bridge without members."""
        within = ["nsenter", "-t", str(self.pid(host)), "-n", "ip"]
        for line in (f"link add {name} type bridge", f"addr add {address} dev {name}", f"link set {name} up"):
            subprocess.run([*within, *line.split()], check=True)

    def remove_interface(self, host: str, name: str) -> None:
        """Take it away again."""
        subprocess.run(["nsenter", "-t", str(self.pid(host)), "-n", "ip", "link", "del", name], check=True)

    def pid(self, host: str) -> int:
        """A process of the host, as this machine numbers it."""
        raise NotImplementedError

    def start(self, line: str, *, host: str = "host1", **environ: str) -> Running:
        """Start a shell line on a host."""
        return Running([*self.inside(host, environ), "bash", "-c", line])

    def run(self, line: str, *, host: str = "host1", limit_s: float = 280, **environ: str) -> Ended:
        """Run a shell line on a host to its end."""
        return self.start(line, host=host, **environ).finish(limit_s)

    def write(self, path: str, text: str) -> None:
        """Put a file onto the shared folder."""
        subprocess.run(
            [*self.inside("host1", {}), "bash", "-c", f"cat >{shlex.quote(path)}"], input=text, text=True, check=True
        )

    def read(self, path: str) -> str:
        """A file of the shared folder."""
        return subprocess.run(
            [*self.inside("host1", {}), "cat", path], capture_output=True, text=True, check=True
        ).stdout

    def leftovers(self, limit_s: float) -> dict[str, list[str]]:
        """What a job has left on the hosts once `limit_s` is over; empty as soon as nothing is left."""
        deadline = time.monotonic() + limit_s
        while True:
            left = {host: lines for host in self.names if (lines := self.processes(host))}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.3)

    def slots(self, number: int, *hosts: str) -> str:
        """`-H` with the same number of slots everywhere."""
        return ",".join(f"{host}:{number}" for host in hosts or self.names)


class Containers(Hosts):
    """docker/cluster: real containers, each with its own address, file system and sshd."""

    kind = "containers"
    shared = "/shared"
    python = "/opt/hvdtrain/bin/python"
    ssh_state = "/var/lib/hvdtrain-ssh"

    def __init__(self, num_hosts: int, project: str) -> None:
        super().__init__([f"host{number}" for number in range(1, num_hosts + 1)])
        self.project = project
        self.environ = {**os.environ, "HVDTRAIN_CLUSTER": project}

    def script(self, *words: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        """docker/cluster WORDS."""
        return subprocess.run(
            [str(ROOT / "docker/cluster"), *words],
            capture_output=True, text=True, timeout=limit_s, env=self.environ, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def container(self, host: str) -> str:
        ids = docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self.project}",
                     "--filter", f"label=com.docker.compose.service={host}").split()  # fmt: skip
        assert len(ids) == 1, f"{host}: {ids}"
        return ids[0]

    def inside(self, host: str, environ: dict[str, str], tty: bool = False) -> list[str]:
        words = ["docker", "exec", "-i"]
        for name, value in environ.items():
            words += ["-e", f"{name}={value}"]
        return [*words, self.container(host)]

    def processes(self, host: str) -> list[str]:
        lines = docker("exec", self.container(host), "ps", "-eo", "stat=,args=").splitlines()
        ours = ("docker-init", "tini", "/sbin/docker-init", "sshd", "sshd:", "/usr/sbin/sshd", "ps", "bash", "runc")
        return [
            line for line in (raw.split(None, 1)[-1].strip() for raw in lines if not raw.lstrip().startswith("Z"))
            if line.split()[0] not in ours and "hvdtrain-ssh up" not in line and "ss -ltnH" not in line
        ]  # fmt: skip

    def pid(self, host: str) -> int:
        return int(docker("inspect", "-f", "{{.State.Pid}}", self.container(host)))

    def cable(self, host: str) -> str:
        """This machine's end of the host's eth0. (Off and on the network again, by the engine, it would be eth1.)"""
        number = docker("exec", self.container(host), "cat", "/sys/class/net/eth0/iflink").strip()
        links = Path("/sys/class/net").glob("*/ifindex")
        return next(link.parent.name for link in links if link.read_text().strip() == number)

    def cut(self, host: str) -> None:
        ip("link", "set", self.cable(host), "down")

    def join(self, host: str) -> None:
        ip("link", "set", self.cable(host), "up")

    def stop_clock(self, host: str) -> None:
        """Freeze every process of a host."""
        docker("pause", self.container(host))

    def start_clock(self, host: str) -> None:
        docker("unpause", self.container(host))


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


class Namespaces(Hosts):
    """Network namespaces of this machine joined by a bridge, an sshd in each: no engine needed, root is.

    They share the file system, home included, as machines with an NFS home do; each has its own address, host name and
    /etc/hosts.
    """

    kind = "namespaces"
    ssh_state = "$HOME/.hvdtrain-ssh/$(hostname)"

    def __init__(self, num_hosts: int, folder: Path) -> None:
        super().__init__([f"host{number}" for number in range(1, num_hosts + 1)])
        self.folder = folder
        self.shared = str(folder / "shared")
        self.python = sys.executable
        self.mark = f"hvt{os.getpid() % 10000}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        Path(self.shared).mkdir(parents=True)
        ip("link", "add", f"{self.mark}br", "type", "bridge")
        ip("link", "set", f"{self.mark}br", "up")
        self.pass_firewall("-I")
        addresses = "".join(f"10.213.7.{n} host{n}\n" for n in range(1, len(self.names) + 1))
        for number, host in enumerate(self.names, start=1):
            space = self.space(host)
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
            ip("netns", "add", space)
            ip("link", "add", f"{self.mark}v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{self.mark}v{number}", "master", f"{self.mark}br", "up")
            ip("-n", space, "addr", "add", f"10.213.7.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            # As in docker/compose.yaml: mpirun gives a host up when TCP does.
            ip("netns", "exec", space, "sh", "-c", "echo 5 >/proc/sys/net/ipv4/tcp_retries2")
            self.start_sshd(host)

    def start_sshd(self, host: str) -> None:
        # ssh and sshd look into the user's home, whatever HOME says, and sshd refuses keys below /tmp: two folders
        # of the cluster's are mounted there, in the host's own mount namespace.
        home = self.folder / "home"
        mounts = []
        for name in (".ssh", ".hvdtrain-ssh"):
            (home / name).mkdir(parents=True, exist_ok=True)
            (Path.home() / name).mkdir(exist_ok=True, mode=0o700)
            mounts.append(f"mount --bind {home / name} {Path.home() / name}")
        # What a person has put into .bashrc is no part of the test, and bash reads it when sshd starts it.
        mounts.append(f"test ! -e {Path.home()}/.bashrc || mount --bind /dev/null {Path.home()}/.bashrc")
        up = [str(ROOT / "docker/ssh/hvdtrain-ssh"), "up", str(self.folder / "keys"), "--port", str(PORT)]
        line = "; ".join([*mounts, f"hostname {host}", shlex.join([*up, "--name", host, "--foreground", *self.names])])
        own = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self.daemons[host] = subprocess.Popen(
            ["ip", "netns", "exec", self.space(host), *own, "bash", "-c", line],
            env=self.host_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{host}.log").open("wb"),
        )
        deadline = time.monotonic() + 20
        listening = ["ip", "netns", "exec", self.space(host), "ss", "-ltnH", f"sport = :{PORT}"]
        while subprocess.run(listening, capture_output=True, check=False).stdout == b"":
            assert time.monotonic() < deadline, (self.folder / f"{host}.log").read_text()
            time.sleep(0.1)

    def host_environ(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{ROOT}/docker/ssh:{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**{k: v for k, v in os.environ.items() if k != "HVDTRAIN_SSH_STATE"}, "PATH": path}

    def pass_firewall(self, what: str) -> None:
        """A Docker engine on this machine makes the kernel drop what other bridges carry, too."""
        if shutil.which("iptables"):
            rule = ["FORWARD", "-i", f"{self.mark}br", "-o", f"{self.mark}br", "-j", "ACCEPT"]
            subprocess.run(["iptables", what, *rule], check=False, capture_output=True)

    def space(self, host: str) -> str:
        return f"{self.mark}{host}"

    def inside(self, host: str, environ: dict[str, str], tty: bool = False) -> list[str]:
        variables = {**self.host_environ(), **environ}
        keep = ["PATH", *environ]
        return ["nsenter", "-t", str(self.pid(host)), "-n", "-u", "-m", "-p", f"--wd={self.shared}",
                "env", "-u", "HVDTRAIN_SSH_STATE", *(f"{name}={variables[name]}" for name in keep)]  # fmt: skip

    def processes(self, host: str) -> list[str]:
        words = [*self.inside(host, {}), "ps", "-eo", "args="]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        ours = ("sshd", "/usr/sbin/sshd", "ps", "bash", "sshd:")
        return [line for line in lines if line.split()[0] not in ours and "hvdtrain-ssh up" not in line]

    def pid(self, host: str) -> int:
        return next(iter(children(self.daemons[host].pid)))

    def cut(self, host: str) -> None:
        ip("link", "set", f"{self.mark}v{host[4:]}", "down")

    def join(self, host: str) -> None:
        ip("link", "set", f"{self.mark}v{host[4:]}", "up")

    def down(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        for host in self.names:
            subprocess.run(["ip", "netns", "del", self.space(host)], check=False)
            shutil.rmtree(Path("/etc/netns") / self.space(host), ignore_errors=True)
        self.pass_firewall("-D")
        subprocess.run(["ip", "link", "del", f"{self.mark}br"], check=False)
        with contextlib.suppress(OSError):
            (Path.home() / ".hvdtrain-ssh").rmdir()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def engine_is_usable() -> str | None:
    """None where containers can be started, else why not."""
    if shutil.which("docker") is None:
        return "there is no docker"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    for image in ("hvdtrain:ddp", "hvdtrain:horovod"):
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode != 0:
            return f"there is no image {image} (docker/build makes it)"
    return None


def namespaces_are_usable() -> str | None:
    """None where network namespaces can be made, else why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nsenter", "unshare", "sshd"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"there is no {program}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "network namespaces cannot be made here"
