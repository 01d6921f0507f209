#!/usr/bin/env bash
# Speech recognition from nothing to a character error rate: makes and prepares the corpus where there is none, trains,
# decodes. On several machines, on each of them, with DATA on a shared folder, where machine 0 makes it, or made on each
# beforehand (see examples/launch/start.sh for launcher, num_nodes, node_rank, num_procs, master_addr):
#
#     num_procs=2 bash examples/asr/run.sh [--data DIR] [--cmvn FILE] [--checkpoint FILE] [options of `hvdtrain train`]
#     num_nodes=2 node_rank=0 master_addr=host1 bash examples/asr/run.sh --backend horovod
#
#   --data         a corpus in AISHELL-1's folders (default: examples/asr/data, made with espeak-ng)
#   --cmvn         the file of CMVN sums (default: DATA/prepared/global_cmvn.json)
#   --checkpoint   start from the weights of this checkpoint
#   --config       another job file (default: examples/asr/asr.yaml)
#   --output       where results go (default: runs/asr)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${python:-python3}
data=$here/data cmvn='' checkpoint='' config=$here/asr.yaml output=runs/asr
options=()
while (($# > 0)); do
    case $1 in
    --data | --cmvn | --checkpoint | --config | --output)
        (($# > 1)) || { echo "run.sh: error: $1 needs a value" >&2; exit 2; }
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
    --data=* | --cmvn=* | --checkpoint=* | --config=* | --output=*)
        name=${1%%=*}
        printf -v "${name#--}" '%s' "${1#*=}"
        shift
        ;;
    *) options+=("$1"); shift ;;
    esac
done

if [[ ${node_rank:-0} != 0 ]]; then
    # Two machines that make the same files in the same folder would disturb each other.
    for ((waited = 0; ; waited++)); do
        [[ ! -f $data/prepared/test.f16 ]] || break
        if ((waited == 0)); then echo "== waiting for machine 0 to prepare $data"; fi
        if ((waited >= 600)); then
            echo "run.sh: error: no $data/prepared/test.f16 after 10 minutes. Where $data is this machine's own, run" \
                "corpus.py and prepare.py on it first; else see what machine 0 says" >&2
            exit 1
        fi
        sleep 1
    done
fi
if [[ ! -d $data/wav ]]; then
    echo "== $data holds no corpus: making one with espeak-ng"
    "$python" "$here/corpus.py" --data "$data"
fi
if [[ ! -f $data/prepared/test.f16 ]]; then
    echo "== features and CMVN"
    # Sums that were given are used, not written over.
    "$python" "$here/prepare.py" --data "$data"
fi
echo "== training"
bash "$here/../launch/start.sh" -m hvdtrain train "$config" --output "$output" --set "task_options.data=$data" \
    ${cmvn:+--set "task_options.cmvn=$cmvn"} ${checkpoint:+--set "task_options.checkpoint=$checkpoint"} "${options[@]}"
if [[ ${node_rank:-0} = 0 ]]; then
    echo "== decoding"
    for split in dev test; do
        "$python" "$here/decode.py" --data "$data" ${cmvn:+--cmvn "$cmvn"} --checkpoint "$output" --split $split
    done
fi
