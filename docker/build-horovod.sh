#!/bin/sh
# Inside the build stage of horovod.Dockerfile: put a Horovod wheel for the installed torch into a folder.
set -eu
out=$1
mkdir -p "$out"
for wheel in /wheelhouse/horovod-*.whl; do
    if [ -e "$wheel" ]; then
        cp "$wheel" "$out/"
        exit 0
    fi
done
touch /src/hvdtrain/__init__.py
# The source release may lie in the wheelhouse; pip looks there before, and without an index only there.
export PIP_FIND_LINKS=/wheelhouse
for source in /wheelhouse/horovod-*.tar.gz; do
    if [ -e "$source" ]; then export PIP_NO_INDEX=1; fi
done
cd /src
exec /opt/hvdtrain/bin/python -m hvdtrain.cli.build_horovod --wheel-only "$out"
