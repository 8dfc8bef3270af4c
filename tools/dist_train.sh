#!/usr/bin/env bash
# dist_train.sh CONFIG GPUS [options of train.py]; NNODES, NODE_RANK, MASTER_ADDR and PORT as in mmpretrain's own.
set -e
exec python -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$2" \
    "$(dirname "$0")/train.py" "$1" --launcher pytorch "${@:3}"
