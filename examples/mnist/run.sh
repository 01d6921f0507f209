#!/usr/bin/env bash
# Sets up .venv, if need be, and trains the MNIST example with two processes on native DDP. The data is in the repository.
#
#     bash examples/mnist/run.sh [options of `hvdtrain train`, such as --set epochs=2]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=.setup/venv.sh
. .setup/venv.sh
find_python
install_missing "Python"
ensure_venv ""

# A folder of its own for each run: a folder that holds checkpoints is not trained into without --resume.
number=1
while [ -e "runs/mnist-$number" ]; do number=$((number + 1)); done

options=()
if has_gpu && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
    say "fewer than two GPUs that torch can use: the two processes train on the CPU"
    options=(--set device=cpu)
fi
# torchrun would set it to 1, and print a warning of five lines.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > 1 ? $(nproc) / 2 : 1))}

say "training examples/mnist/ddp.yaml with two processes; results go to $PWD/runs/mnist-$number"
status=0
python -m torch.distributed.run --standalone --nproc_per_node 2 -m hvdtrain train examples/mnist/ddp.yaml \
    --output "runs/mnist-$number" "${options[@]}" "$@" || status=$?
if [ "$status" -ne 0 ]; then
    printf 'error: the training ended with status %s, see above\n' "$status" >&2
    exit "$status"
fi
say "done. In $PWD/runs/mnist-$number: summary.json (accuracy, speed), metrics.jsonl, checkpoints/, tensorboard/"
