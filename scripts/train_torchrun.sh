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
NNODES=${NNODES:-1} RANKS_PER_NODE=${RANKS_PER_NODE:-8} MASTER_PORT=${MASTER_PORT:-29500}

# whole NAME LEAST MOST MEANING: refuse a variable that is no whole number from LEAST to MOST
whole() {
  local value=${!1}
  [[ ! $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < $2 || 10#$value > $3)) || return 0
  echo "$0: $1 is '$value'; it must be a whole number from $2 to $3: $4" >&2
  exit 2
}

whole NNODES 1 999999999 "the number of nodes; export it, or unset it for one node"
whole RANKS_PER_NODE 1 999999999 "the ranks of a node, parallel.ranks_per_node of the config; export it"
whole MASTER_PORT 1 65535 "a free port of node 0, the same on all nodes; export it, or unset it for 29500"
if ((10#$NNODES != 1)); then # torchrun would wait for the other nodes on this one
  : "${NODE_RANK:?is not set: the number of this node, from 0 to NNODES - 1}"
  : "${MASTER_ADDR:?is not set: name or address of node 0, the same on all nodes}"
  source "$(dirname "${BASH_SOURCE[0]}")/nccl_env.sh"
fi
NODE_RANK=${NODE_RANK:-0}
whole NODE_RANK 0 $((10#$NNODES - 1)) "the number of this node, from 0 to NNODES - 1; export it"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun \
  --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --nproc-per-node "$RANKS_PER_NODE" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT" \
  -m ep_dispatcher.train --config "$config" "$@"
