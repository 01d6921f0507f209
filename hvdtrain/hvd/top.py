"""What `import horovod` gives under `hvdtrain exec --backend ddp`."""

from __future__ import annotations

# The release whose API is provided.
__version__ = "0.28.1"

# Marks it as a package; what is below it is found by the import hook (see `alias`), not in a folder.
__path__: list[str] = []
