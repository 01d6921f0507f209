"""Runs a function on ranks that are placed on hosts, and brings back what each rank returned.

placement.py    what a place can do                             rank.py      the process of one rank
cluster.py      ranks on real hosts, over `hvdtrain launch`     own_processes.py   ranks that we start ourselves:
local.py        on this machine as it is                        namespaces.py      on network namespaces of it
processes.py    waits for processes and ends them               specification.py   what a rank is told
"""

from hvdtrain.bench.placed.cluster import ClusterPlace
from hvdtrain.bench.placed.local import LocalPlace
from hvdtrain.bench.placed.namespaces import NamespacePlace
from hvdtrain.bench.placed.placement import Place, Spread

__all__ = ["ClusterPlace", "LocalPlace", "NamespacePlace", "Place", "Spread"]
