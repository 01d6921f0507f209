#!/usr/bin/env bash
# Sets up everything that the tests need (system packages when root, saying so; .venv; Horovod) and runs all checks.
#
#     bash tests/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=.setup/venv.sh
. .setup/venv.sh
# shellcheck source=.setup/programs.sh
. .setup/programs.sh

find_python
need_for_tests
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
