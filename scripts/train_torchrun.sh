#!/usr/bin/env bash
# The same job with torchrun, on one node or, run on each node, on several.
#
#   scripts/train_torchrun.sh configs/h200_8gpu.yaml [TRAIN_OPTION...]
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=first-node scripts/train_torchrun.sh configs/h200_4x8_slurm.yaml
#
# NNODES (1), RANKS_PER_NODE (8) and MASTER_PORT (29500); several nodes also need NODE_RANK and
# MASTER_ADDR. They must fit the section `parallel` of the config; a mismatch is refused.
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 1; }

config=$1
shift
if [[ ${NNODES:-1} != 1 ]]; then # torchrun would wait for the other nodes on this one
  : "${NODE_RANK:?is not set: the number of this node, from 0 to NNODES - 1}"
  : "${MASTER_ADDR:?is not set: name or address of node 0, the same on all nodes}"
fi
[[ ${NNODES:-1} == 1 ]] || source "$(dirname "${BASH_SOURCE[0]}")/nccl_env.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun \
  --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
  --nproc-per-node "${RANKS_PER_NODE:-8}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  -m ep_dispatcher.train --config "$config" "$@"
