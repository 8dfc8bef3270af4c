#!/usr/bin/env bash
# slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of train.py]; GPUS, GPUS_PER_NODE, CPUS_PER_TASK and
# SRUN_ARGS as in mmpretrain's own.
set -e
if [[ $# -lt 4 || " ${*:1:4}" == *" -"* ]]; then
    echo "usage: [GPUS=8] slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of train.py]" >&2
    exit 2
fi
# shellcheck disable=SC2086  # SRUN_ARGS is a list of words
exec srun -p "$1" \
    --job-name="$2" \
    --gres="gpu:${GPUS_PER_NODE:-8}" \
    --ntasks="${GPUS:-8}" \
    --ntasks-per-node="${GPUS_PER_NODE:-8}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    python -u "$(dirname "$0")/train.py" "$3" --work-dir="$4" --launcher=slurm "${@:5}"
