#!/usr/bin/env bash
# Train one config with each dispatcher, same seed and data; overlay loss, step time and memory.
#
#   scripts/ablate.sh [CONFIG] [--steps N] [--dispatchers NAME...] [--out FOLDER] [--data PATH]
#                    [--limit SECONDS] [--commit HASH]
#
# CONFIG defaults to configs/tiny_cpu.yaml; names: alltoall, ep_dispatcher, allgather. The first one
# is what the losses of the others are compared with. --steps must be above 5, as the first 5 are
# not timed; --limit ends a run that takes longer. Exit code 1 if any run left no loss.
# PYTHON: interpreter (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=configs/tiny_cpu.yaml
if (($#)) && [[ $1 != --* ]]; then
  config=$1
  shift
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m ep_dispatcher.bench.train_ablation --config "$config" "$@"
