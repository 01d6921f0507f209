"""Building Horovod 0.28.1 for the torch that is installed, and explaining why an installed one does not load.

    torch_facts     what the build must match: version, C++ standard, ABI, CUDA
    prerequisites   compilers, cmake, headers: what is missing, with the line that installs it
    source          the pinned release, fetched through pip, checked against its hash
    patch           the few lines of it that a current torch needs changed
    build           pip wheel over the patched source, with progress and a log
    cache           built wheels, kept by everything that decides whether they load
    install         pip install of the wheel and of what it needs at run time
    proof           a real all-reduce between two processes
    recipe          the order of all that: `hvdtrain build-horovod`
    explain         `import horovod.torch` failed: which of the usual reasons it was, and the cure

Horovod is never imported here; whatever needs it runs in a process of its own.
"""

from hvdtrain.horovod_build.explain import explain_import_failure

__all__ = ["explain_import_failure"]
