"""What works on this machine, and the cure for what does not: `hvdtrain doctor`.

Each subject is a pair of functions in a file of its own: `probe_...` looks at the machine, `check_...` turns what was
seen into findings and looks at nothing but its arguments.
"""

from hvdtrain.doctor.finding import Finding, Status

__all__ = ["Finding", "Status"]
