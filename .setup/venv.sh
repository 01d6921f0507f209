# shellcheck shell=bash
# Sourced from the top folder of the repository by examples/mnist/run.sh, tests/run.sh and .ci: makes .venv and keeps it
# up to date.

# The release that the tests run with. It is installed on its own and first: with the range of pyproject.toml alone pip
# would take the newest release, on x86 with gigabytes of CUDA libraries.
TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Debian's names of the system packages that are not there; filled by find_python and by whoever sources this.
missing=()

# install_missing WHAT-FOR : root on Debian or Ubuntu: says which packages it installs, and does. Anyone else: prints the
# line that does it, and ends.
install_missing() {
    local purpose=$1
    [ ${#missing[@]} -ne 0 ] || return 0
    command -v apt-get >/dev/null ||
        fail "$purpose: this machine lacks what Debian calls: ${missing[*]}. Install it and run this again."
    if [ "$(id -u)" -ne 0 ]; then
        printf 'error: system packages are missing for %s. Install them and run this again:\n\n' "$purpose" >&2
        printf '    sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n\n' "${missing[*]}" >&2
        exit 2
    fi
    say "installing system packages for $purpose with apt-get: ${missing[*]}"
    apt-get update -qq || fail "apt-get update failed, see above"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        fail "apt-get install failed, see above"
    missing=()
}

# Sets PYTHON to a Python of 3.10 or newer; PYTHON=/path/to/python chooses one. Notes the packages that are missing for it
# to make virtual environments.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            PYTHON=$candidate
            # Debian leaves ensurepip out of python3; without it `python3 -m venv` fails half-way.
            "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$(python_package venv)")
            return
        fi
    done
    if command -v python3 >/dev/null; then
        fail "$(command -v python3) is $(python3 --version 2>&1); 3.10 or newer is needed." \
            "Another one: PYTHON=/path/to/python3 bash $0"
    fi
    PYTHON=python3
    missing+=(python3 python3-venv)
}

# python_package venv|dev : Debian's name of that part of $PYTHON.
python_package() {
    if [ "$(command -v "$PYTHON")" = "$(command -v python3)" ]; then
        echo "python3-$1"
    else
        "$PYTHON" -c "import sys; print('python%d.%d-$1' % sys.version_info[:2])"
    fi
}

has_gpu() { [ -e /dev/nvidia0 ] || [ -e /dev/kfd ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }

# has_cpu_torch REQUIREMENT OPTIONS... : whether that torch is a CPU build where pip looks by itself; OPTIONS: pip install's.
has_cpu_torch() { pip install --dry-run --no-deps "$@" 2>/dev/null | grep -q '+cpu'; }

install_torch() {
    local wanted="torch==$TORCH_VERSION"
    python -c "import importlib.metadata as m; raise SystemExit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" \
        2>/dev/null && return
    if ! has_gpu && ! has_cpu_torch "$wanted"; then
        say "installing $wanted (no GPU seen: its CPU build, about 200 MB)"
        pip install --quiet --retries 1 --timeout 20 --index-url "$TORCH_CPU_INDEX" "$wanted" && return
        say "the CPU build could not be had, see above; taking the one that pip's index has"
    fi
    say "installing $wanted"
    pip install --quiet "$wanted" || fail "torch could not be installed, see above"
}

pip() { python -m pip --disable-pip-version-check "$@"; }

# ensure_venv EXTRAS : after find_python and install_missing. Makes .venv, if need be, installs torch and this package with the extras ("" or "dev,horovod"),
# and puts .venv first in PATH. Does nothing when that was done for this pyproject.toml, this torch and this folder.
ensure_venv() {
    local extras=$1 python=.venv/bin/python stamp wanted
    wanted=$({
        cat pyproject.toml "${BASH_SOURCE[0]}"
        pwd -P
        "$PYTHON" -VV
    } | sha256sum)
    stamp=.venv/.ready-${extras:-plain}
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        # A half-made environment, one of another folder (its scripts name their Python by path) or another Python.
        if [ "$(cat .venv/.made-for 2>/dev/null)" != "$(pwd -P) $("$PYTHON" -VV)" ]; then
            say "making the virtual environment .venv with $("$PYTHON" --version)"
            rm -rf .venv
            "$PYTHON" -m venv .venv || fail "the virtual environment could not be made, see above"
            echo "$(pwd -P) $("$PYTHON" -VV)" >.venv/.made-for
        fi
        PATH=$PWD/.venv/bin:$PATH
        install_torch
        say "installing hvdtrain${extras:+ with what $extras need}"
        pip install --quiet -e ".${extras:+[$extras]}" || fail "hvdtrain could not be installed, see above"
        echo "$wanted" >"$stamp"
    fi
    PATH=$PWD/.venv/bin:$PATH
    export PATH
    "$python" -c '' || fail "$python does not start; remove .venv and run this again"
}
