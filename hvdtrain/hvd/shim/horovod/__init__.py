"""Stands in for Horovod in subprocesses of `hvdtrain exec --backend ddp`: installs the import hook and steps aside."""

import importlib
import sys

from hvdtrain.hvd import alias

MARK_OF_THE_SHIM = True

alias.install()
sys.modules[__name__] = importlib.import_module("horovod")
