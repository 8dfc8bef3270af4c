#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT GPUS [options of test.py]; NNODES, NODE_RANK, MASTER_ADDR and PORT as in mmpretrain's.
set -e
exec python -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$3" \
    "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
