#!/usr/bin/env bash
# Starts the ranks of this machine by hand, one per visible GPU, without any launcher. On every machine:
#
#     num_nodes=2 node_rank=0 init_method=tcp://host1:29500 bash run.sh job.yaml [options of `hvdtrain train`]
#     num_nodes=2 node_rank=1 init_method=tcp://host1:29500 bash run.sh job.yaml
#
#   num_nodes      machines (1)
#   node_rank      which one this is, from 0 (0)
#   init_method    tcp://HOST:PORT, HOST being machine 0, or file:///FOLDER/FILE on a folder that all machines see;
#                  needed with more than one machine
#   num_procs      ranks here; default: the number of devices in CUDA_VISIBLE_DEVICES, or else of GPUs, or else 1
#
# The exit status is that of the first rank that failed; the others are then ended. SIGTERM and Ctrl-C ask the ranks to
# stop: they save a checkpoint, and the status is 75.
set -euo pipefail

num_nodes=${num_nodes:-1}
node_rank=${node_rank:-0}
(($# > 0)) || { echo "usage: [num_nodes=N node_rank=I init_method=URL] run.sh job.yaml [options]" >&2; exit 2; }
if [[ -z ${init_method:-} ]]; then
    ((num_nodes == 1)) || { echo "run.sh: num_nodes=$num_nodes needs init_method, e.g. tcp://host1:29500" >&2; exit 2; }
    init_method=tcp://127.0.0.1:$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
fi

devices=()
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -r -a devices <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
    mapfile -t devices < <(nvidia-smi --query-gpu=index --format=csv,noheader)
fi
num_procs=${num_procs:-${#devices[@]}}
((num_procs > 0)) || num_procs=1

pids=() asked=no
stop() { ((${#pids[@]} == 0)) || kill -"$1" "${pids[@]}" 2>/dev/null || true; }
# A request to stop goes to every rank: they agree on a step and save.
trap 'asked=yes; stop TERM' TERM INT
for ((i = 0; i < num_procs; i++)); do
    # Ranks that start after the others were asked to stop would wait for them.
    [[ $asked = no ]] || break
    hvdtrain train "$@" --init-method "$init_method" --rank $((node_rank * num_procs + i)) \
        --world-size $((num_nodes * num_procs)) --local-rank "$i" &
    pids+=($!)
done
((${#pids[@]} > 0)) || exit 143

status=0
for _ in "${pids[@]}"; do
    # A trapped signal interrupts `wait` with a status above 128 and no process, `ended` being unset; then wait again.
    while true; do
        code=0
        wait -n -p ended "${pids[@]}" || code=$?
        if [[ -n ${ended:-} ]] || ((code <= 128)); then break; fi
    done
    if ((code != 0 && status == 0)); then
        status=$code
        # Ranks that stop on request do so together; any other end is everybody's.
        if ((code != 75)); then stop TERM; fi
    fi
    for i in "${!pids[@]}"; do if [[ ${pids[i]} = "${ended:-}" ]]; then unset "pids[i]"; fi; done
done
exit "$status"
