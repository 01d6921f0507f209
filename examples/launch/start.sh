#!/usr/bin/env bash
# Starts a Python script as ranks with any launcher; the recipes' run.sh call it. On every machine:
#
#     num_nodes=2 node_rank=0 master_addr=host1 bash start.sh script.py [its options]
#     num_nodes=2 node_rank=1 master_addr=host1 bash start.sh script.py [its options]
#
#   launcher       torchrun (default), launch (python -m torch.distributed.launch): started on every machine;
#                  mpirun, horovodrun, hvdtrain (hvdtrain launch): started on machine 0, reach the others over ssh
#   num_nodes      machines (1)
#   node_rank      which one this is, from 0 (0)
#   num_procs      ranks on each machine; default: the number of GPUs, or else 1
#   master_addr    name or address of machine 0; needed with more than one machine
#   master_port    a free port there (29500)
#   hosts          for the launchers of machine 0: the machines with their ranks, host1:2,host2:2
#   ssh_port       likewise: where their sshd listens; default: what ssh's own configuration says
#   python         the interpreter (python3)
set -euo pipefail

launcher=${launcher:-torchrun}
num_nodes=${num_nodes:-1}
node_rank=${node_rank:-0}
master_port=${master_port:-29500}
python=${python:-python3}

fail() {
    printf 'start.sh: error: %s\n' "$*" >&2
    exit 2
}

(($# > 0)) || fail "usage: [num_nodes=N node_rank=I master_addr=HOST launcher=NAME] start.sh script.py [options]"
if [[ -z ${num_procs:-} ]]; then
    num_procs=1
    if command -v nvidia-smi >/dev/null; then num_procs=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l); fi
    ((num_procs > 0)) || num_procs=1
fi
size=$((num_nodes * num_procs))
# torchrun would set it to 1 and say so in five lines; on GPUs the cores feed them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / num_procs > 0 ? $(nproc) / num_procs : 1))}

case $launcher in
torchrun | launch)
    module=torch.distributed.run
    [[ $launcher = torchrun ]] || module=torch.distributed.launch
    if ((num_nodes == 1)); then
        where=(--standalone)
    else
        [[ -n ${master_addr:-} ]] || fail "num_nodes=$num_nodes needs master_addr, the name of machine 0"
        where=(--nnodes "$num_nodes" --node_rank "$node_rank" --master_addr "$master_addr" --master_port "$master_port")
    fi
    exec "$python" -m "$module" --nproc_per_node "$num_procs" "${where[@]}" "$@"
    ;;
mpirun | horovodrun | hvdtrain)
    if ((node_rank != 0)); then
        echo "start.sh: $launcher on machine 0 starts the ranks of this machine too; nothing to do here"
        exit 0
    fi
    if [[ -z ${hosts:-} ]]; then
        ((num_nodes == 1)) || fail "launcher=$launcher on $num_nodes machines needs hosts, such as hosts=host1:$num_procs,host2:$num_procs"
        hosts=localhost:$num_procs
    fi
    case $launcher in
    mpirun)
        if [[ $(id -u) = 0 ]]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
        # Several hosts: the ranks meet at MASTER_ADDR; one host: they find each other without.
        where=()
        if [[ -n ${master_addr:-} ]]; then where=(-x "MASTER_ADDR=$master_addr" -x "MASTER_PORT=$master_port"); fi
        ((num_nodes == 1)) || [[ -n ${master_addr:-} ]] || fail "num_nodes=$num_nodes needs master_addr, the name of machine 0"
        if [[ -n ${ssh_port:-} ]]; then where+=(-mca plm_rsh_args "-p $ssh_port"); fi
        exec mpirun -np "$size" -H "$hosts" "${where[@]}" -x PATH -x OMP_NUM_THREADS \
            -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib "$python" "$@"
        ;;
    horovodrun) exec horovodrun -np "$size" -H "$hosts" ${ssh_port:+-p "$ssh_port"} "$python" "$@" ;;
    hvdtrain) exec hvdtrain launch -np "$size" -H "$hosts" ${ssh_port:+-p "$ssh_port"} "$python" "$@" ;;
    esac
    ;;
*) fail "launcher=$launcher is none of torchrun, launch, mpirun, horovodrun, hvdtrain" ;;
esac
