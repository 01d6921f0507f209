"""Hosts to measure on: network namespaces of this machine joined by a switch, and what is known of any host's links.

namespaces.py   makes hosts that vanish with this process      rates.py      "1gbit" <-> bits per second
tbf.py          the lines that limit one interface              counters.py   the kernel's bytes of an interface
shaping.py      the limit of a real interface, always undone

    with namespace_hosts(2) as hosts:
        hosts.shape(parse_rate("1gbit"))
        ranks = [subprocess.Popen(host.command([sys.executable, "rank.py", hosts[0].address])) for host in hosts]
"""

from hvdtrain.bench.hosts.counters import Traffic, read_traffic
from hvdtrain.bench.hosts.namespaces import NamespaceHost, NamespaceHosts, namespace_hosts
from hvdtrain.bench.hosts.rates import format_rate, parse_rate

__all__ = [
    "NamespaceHost",
    "NamespaceHosts",
    "Traffic",
    "format_rate",
    "namespace_hosts",
    "parse_rate",
    "read_traffic",
]
