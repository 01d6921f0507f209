#!/bin/sh
# Inside the build stage of horovod.Dockerfile: put a Horovod wheel for the installed torch, and mpi4py, into a folder.
set -eu
out=$1
mkdir -p "$out"
# Hands rank 0's address to the others where mpirun starts the ddp backend and nobody set MASTER_ADDR.
mpi4py=mpi4py==4.1.2
# What the wheelhouse has for this Python, if anything.
from_wheelhouse() {
    /opt/hvdtrain/bin/pip download -q --no-deps --no-index --find-links /wheelhouse --only-binary :all: -d "$out" "$1" 2>/dev/null
}
from_wheelhouse "$mpi4py" || /opt/hvdtrain/bin/pip download -q --no-deps -d "$out" "$mpi4py"
if from_wheelhouse horovod; then exit 0; fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    build-essential cmake libopenmpi-dev openmpi-bin python3-dev
touch /src/hvdtrain/__init__.py
# The source release may lie in the wheelhouse; pip looks there before, and without an index only there.
export PIP_FIND_LINKS=/wheelhouse
for source in /wheelhouse/horovod-*.tar.gz; do
    if [ -e "$source" ]; then export PIP_NO_INDEX=1; fi
done
cd /src
exec /opt/hvdtrain/bin/python -c "from hvdtrain.cli.build_horovod import command; command()" --wheel-only "$out"
