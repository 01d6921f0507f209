#!/usr/bin/env bash
# Starts main.py on this machine's ranks; on several machines, on each of them (see examples/launch/start.sh):
#
#     num_procs=2 bash examples/resnet/run.sh --backend=gloo --use_syn --batch_size=8 --arch=resnet18
#     num_nodes=2 node_rank=0 master_addr=host1 launcher=torchrun bash examples/resnet/run.sh --backend=nccl ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/../launch/start.sh" "$here/main.py" "$@"
