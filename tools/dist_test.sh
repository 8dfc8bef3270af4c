#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT GPUS [options of test.py]; NNODES, NODE_RANK, MASTER_ADDR and PORT as in mmpretrain's.
# Without PORT, a test on one machine takes any free port, so that two of them do not meet.
set -e
if [[ ! ${3:-} =~ ^([1-9][0-9]*|auto|cpu|gpu)$ ]]; then
    echo "usage: dist_test.sh CONFIG CHECKPOINT GPUS [options of test.py], with GPUS processes on this machine" >&2
    exit 2
fi
DIST_TOOL=test.py exec bash "$(dirname "$0")/dist_train.sh" "$1" "$3" "$2" "${@:4}"
