#!/usr/bin/env bash
# Start MPS afresh in the folder that CUDA_MPS_PIPE_DIRECTORY names; nothing without that variable.
#
# A process that is killed while its kernel waits leaves the MPS server faulted, and the clients that
# come next fail. `ep-dispatcher bench run --recover scripts/restart_mps.sh` runs this after such an end.
set -uo pipefail
pipe=${CUDA_MPS_PIPE_DIRECTORY:-}
[[ -n $pipe ]] || exit 0
pid=$(cat "$pipe/nvidia-cuda-mps-control.pid" 2>/dev/null)
echo quit | LD_PRELOAD='' timeout 5 nvidia-cuda-mps-control >/dev/null 2>&1
for _ in {1..10}; do
  [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null || break
  sleep 0.3
done
[[ -z $pid ]] || kill -KILL "$pid" 2>/dev/null
rm -f "$pipe"/nvidia-cuda-mps-control* "$pipe"/control* "$pipe"/log
LD_PRELOAD='' nvidia-cuda-mps-control -d
