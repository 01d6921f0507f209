#!/usr/bin/env bash
# Sets up everything that the tests need (system packages when root, saying so; .venv; Horovod) and runs all checks.
#
#     bash tests/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=.setup/venv.sh
. .setup/venv.sh

find_python
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need c++ g++
need make make
need cmake cmake
need mpicxx libopenmpi-dev
need mpirun openmpi-bin
need ssh openssh-client
# Debian keeps it where only root's PATH looks.
PATH=$PATH:/usr/sbin:/sbin need sshd openssh-server
PATH=$PATH:/usr/sbin:/sbin need ip iproute2
need shellcheck shellcheck
need espeak-ng espeak-ng
has_headers='import pathlib, sysconfig; raise SystemExit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
"$PYTHON" -c "$has_headers" 2>/dev/null || missing+=("$(python_package dev)")
install_missing "the tests"
ensure_venv dev,horovod,asr,plots

say "Horovod"
hvdtrain build-horovod

say "style and types"
ruff check .
ruff format --check .
mypy
mapfile -t scripts < <(find .ci .setup docker examples tests -type f -exec \
    awk 'FNR == 1 && /^#! ?\/(usr\/)?bin\/(env )?(ba|da)?sh|^# shellcheck shell=/ { print FILENAME }' {} +)
shellcheck -x "${scripts[@]}"

say "tests"
python -m pytest tests/unit
python -m pytest tests/multiprocess
say "all checks passed"
