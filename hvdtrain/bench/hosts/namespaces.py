"""Hosts in small: network namespaces of this machine, each with one link to a switch.

A namespace here has no name and no process of its own. It is held by an open file of this process, and by the ranks
that run in it, and the ranks end with this process. So whatever ends it, SIGKILL included, the kernel takes the
namespaces away with their links, bridge and shaping; nothing of it is ever visible among the machine's own interfaces.

All hosts share the machine's processors and memory: these are hosts as far as the network goes, and no further.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from hvdtrain.bench.hosts.counters import Traffic, traffic_in
from hvdtrain.bench.hosts.tbf import shape_line, unshape_line
from hvdtrain.errors import LaunchError

_CLONE_NEWNET = 0x40000000  # of unshare(2)
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux", "unshare": "util-linux"}
# Debian keeps ip and tc where only root's PATH looks.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_LIMIT_S = 20.0
INTERFACE = "eth0"
# Gives a process a host name and a table of all hosts' names, both its own: the file lives in memory and goes with it.
# Horovod 0.28.1 needs a name that leads to the host: HOROVOD_GLOO_IFACE does not reach the connections of its process
# sets, the one of all ranks included, and the machine's own name leads to its loopback.
_NAMED = """
echo "$1" > /proc/sys/kernel/hostname && mount -t tmpfs tmpfs /mnt && printf "%s" "$2" > /mnt/hosts &&
mount --bind /mnt/hosts /etc/hosts && umount /mnt && shift 2 && exec "$@"
"""
# Of a range that is set aside for benchmarks (RFC 2544), so that it is nobody's real network.
_NETWORK = "198.18.0"


class Namespace:
    """One network namespace, which lives until `close()` and the end of the processes in it."""

    def __init__(self) -> None:
        self._file = _new_namespace()

    @property
    def path(self) -> str:
        """A file that stands for the namespace, as `nsenter --net=` and `ip link ... netns` take it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def run(self, *line: str) -> str:
        """Run a short command in it and return its standard output.

        Raises:
            LaunchError: it failed.
        """
        return _run([_tool("nsenter"), f"--net={self.path}", *line])

    def close(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class NamespaceHost:
    """One of the hosts.

    Attributes:
        number: 0, 1, ...
        name: its host name, host1 and so on, which the others know.
        address: its IPv4 address, which the other hosts reach.
        interface: the name of its link.
    """

    def __init__(self, number: int, namespace: Namespace, table: str) -> None:
        self.number = number
        self.name = _name(number)
        self.address = _address(number)
        self.interface = INTERFACE
        self.namespace = namespace
        self._table = table

    def command(self, line: Sequence[str]) -> list[str]:
        """The command line that runs `line` on this host.

        The process has the id of the one that is started (the tools in front replace themselves), and is killed when
        the thread that started it ends.
        """
        enter = [_tool("nsenter"), f"--net={self.namespace.path}", _tool("setpriv"), "--pdeathsig", "KILL"]
        names = [_tool("unshare"), "--uts", "--mount", "sh", "-c", _NAMED, "sh", self.name, self._table]
        return [*enter, *names, *line]

    def traffic(self) -> Traffic:
        """What its link carried so far."""
        return traffic_in(self.namespace.run("cat", "/proc/self/net/dev"), self.interface)


class NamespaceHosts:
    """Hosts and the switch between them; see `namespace_hosts`."""

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= 250:
            raise LaunchError(f"{num_hosts} hosts: choose 1 to 250")
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._switch = self._namespace()
            self._switch.run(_tool("ip"), "link", "add", "bridge0", "type", "bridge")
            self._switch.run(_tool("ip"), "link", "set", "bridge0", "up")
            table = "127.0.0.1 localhost\n" + "".join(f"{_address(n)} {_name(n)}\n" for n in range(num_hosts))
            self._hosts = [NamespaceHost(number, self._namespace(), table) for number in range(num_hosts)]
            for host in self._hosts:
                self._connect(host)
            on_error.pop_all()

    def _namespace(self) -> Namespace:
        namespace = Namespace()
        self._closing.callback(namespace.close)
        return namespace

    def _connect(self, host: NamespaceHost) -> None:
        ip, port = _tool("ip"), _port(host)
        peer = ("peer", "name", host.interface, "netns", host.namespace.path)
        self._switch.run(ip, "link", "add", port, "type", "veth", *peer)
        self._switch.run(ip, "link", "set", port, "master", "bridge0", "up")
        host.namespace.run(ip, "link", "set", "lo", "up")
        host.namespace.run(ip, "address", "add", f"{host.address}/24", "dev", host.interface)
        host.namespace.run(ip, "link", "set", host.interface, "up")

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> NamespaceHost:
        return self._hosts[number]

    def __iter__(self) -> Iterator[NamespaceHost]:
        return iter(self._hosts)

    def shape(self, bits_per_s: float | None) -> None:
        """Give every link this rate in each direction; None: as fast as the machine copies. Works while ranks run.

        Raises:
            LaunchError: `tc` refused (the kernel has no tbf).
        """
        for host in self._hosts:
            for namespace, interface in ((host.namespace, host.interface), (self._switch, _port(host))):
                if bits_per_s is not None:
                    namespace.run(*_with_path(shape_line(interface, bits_per_s)))
                elif " tbf " in namespace.run(_tool("tc"), "qdisc", "show", "dev", interface):
                    namespace.run(*_with_path(unshape_line(interface)))

    def close(self) -> None:
        """Let go of everything; the kernel removes it once the processes on the hosts have ended."""
        self._closing.close()

    def __enter__(self) -> NamespaceHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def namespace_hosts(num_hosts: int, bits_per_s: float | None = None) -> Iterator[NamespaceHosts]:
    """Hosts of this machine for the time of the block, each with a link of `bits_per_s` to one switch.

    Raises:
        LaunchError: not root, no iproute2 or util-linux, or a kernel without namespaces, bridge, veth or tbf.
    """
    with NamespaceHosts(num_hosts) as hosts:
        hosts.shape(bits_per_s)
        yield hosts


def why_not() -> str | None:
    """Why there can be no such hosts here, in words; None: they can be made."""
    try:
        with namespace_hosts(1, 1e9):
            return None
    except LaunchError as error:
        return str(error)


def _name(number: int) -> str:
    return f"host{number + 1}"


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


def _port(host: NamespaceHost) -> str:
    return f"port{host.number}"


def _new_namespace() -> int:
    """An open file on a new network namespace, made by a thread that leaves ours behind and ends."""
    made: list[int] = []

    def leave() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            made.append(-ctypes.get_errno())
            return
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=leave, name="hvdtrain-namespace")
    thread.start()
    thread.join()
    if not made or made[0] < 0:
        reason = os.strerror(-made[0]) if made else "it could not be opened"
        raise LaunchError(
            f"hosts as network namespaces cannot be made here ({reason}): run this as root (in a container: with "
            f"--cap-add SYS_ADMIN --cap-add NET_ADMIN), or measure on real hosts with -H host1,host2"
        )
    return made[0]


def _tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise LaunchError(f"{name} is missing, which makes the hosts' network; install {_TOOLS[name]}")
    return found


def _with_path(line: Sequence[str]) -> list[str]:
    return [_tool(line[0]), *line[1:]]


def _run(line: Sequence[str]) -> str:
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(line)} took longer than {_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise LaunchError(f"{' '.join(line)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
