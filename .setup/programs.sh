# shellcheck shell=bash
# Sourced after venv.sh by tests/run.sh and .ci/cluster: the programs that tests and the build of Horovod need.

# need PROGRAM PACKAGE : notes Debian's package of a program that is not there. Some are where only root's PATH looks.
need() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null || missing+=("$2"); }

# need_for_tests : after find_python.
need_for_tests() {
    need c++ g++
    need make make
    need cmake cmake
    need mpicxx libopenmpi-dev
    need mpirun openmpi-bin
    need ssh openssh-client
    need sshd openssh-server
    need ip iproute2
    need shellcheck shellcheck
    need espeak-ng espeak-ng
    local headers='import pathlib, sysconfig; raise SystemExit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
    "$PYTHON" -c "$headers" 2>/dev/null || missing+=("$(python_package dev)")
}
