#!/usr/bin/env bash
# dist_train.sh CONFIG GPUS [options of train.py]; NNODES, NODE_RANK, MASTER_ADDR and PORT as in mmpretrain's own.
# Without PORT, a training on one machine takes any free port, so that two of them do not meet.
# dist_test.sh names another tool than train.py by DIST_TOOL.
set -e
if [[ ! ${2:-} =~ ^([1-9][0-9]*|auto|cpu|gpu)$ ]]; then
    echo "usage: dist_train.sh CONFIG GPUS [options of train.py], with GPUS processes on this machine" >&2
    exit 2
fi
if [ "${NNODES:-1}" = 1 ] && [ -z "${PORT:-}" ]; then
    where=(--standalone --local_addr=127.0.0.1)
else
    where=(
        --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}"
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}"
    )
fi
exec python -m torch.distributed.run "${where[@]}" --nproc_per_node="$2" \
    "$(dirname "$0")/${DIST_TOOL:-train.py}" "$1" --launcher pytorch "${@:3}"
