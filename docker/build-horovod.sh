#!/bin/sh
# Inside the build stage of horovod.Dockerfile: put a Horovod wheel for the installed torch, and mpi4py, into a folder.
set -eu
out=$1
mkdir -p "$out"
# Hands rank 0's address to the others where mpirun starts the ddp backend and nobody set MASTER_ADDR.
mpi4py=mpi4py==4.1.2
for wheel in /wheelhouse/mpi4py-*.whl; do
    if [ -e "$wheel" ]; then cp "$wheel" "$out/"; fi
done
ls "$out"/mpi4py-*.whl >/dev/null 2>&1 || /opt/hvdtrain/bin/pip download -q --no-deps -d "$out" "$mpi4py"
for wheel in /wheelhouse/horovod-*.whl; do
    if [ -e "$wheel" ]; then
        cp "$wheel" "$out/"
        exit 0
    fi
done
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
