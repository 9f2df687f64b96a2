#!/usr/bin/env bash
# Peer comparison on one GPU, from build to table: 4 ranks under MPS, equal SM budgets.
#
#   scripts/bench_one_gpu.sh [--out FOLDER] [--budget SECONDS] [BENCH_ARGUMENT...]
#
# --out      folder for results.jsonl, report.md, report.html and logs (default: runs/one_gpu)
# --budget   of the whole script, build included (default: 530); what does not fit becomes a row
# The rest goes to `ep-dispatcher bench run`, for example --backends ep_dispatcher/device nccl_ep.
#
# PYTHON     interpreter with torch and pybind11 (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if its wheel is not in that Python; the peer's package
#            (nccl-extensions, with nccl4py and cuda-core) is used where it can be imported
# MPS that runs already is used; else it is started for the time of the script.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
out=runs/one_gpu
budget_s=530
rest=()
while (($#)); do
  case $1 in
    --out) out=$2; shift 2 ;;
    --budget) budget_s=$2; shift 2 ;;
    *) rest+=("$1"); shift ;;
  esac
done
mkdir -p "$out"

export NCCL_MULTI_RANK_GPU_ENABLE=1 # several ranks may share a GPU
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export CUDA_MODULE_LOADING=EAGER # loading lazily can deadlock against a kernel that waits
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

step "native module"
built=$("$PYTHON" -c 'import ep_dispatcher._C as module; print(module.__file__)' 2>/dev/null)
if [[ -z $built || -n $(find csrc setup.py -newer "$built" -type f -print -quit) ]]; then
  "$PYTHON" setup.py -q build_ext --inplace >"$out/build.log" 2>&1 ||
    echo "the build failed, so ep_dispatcher/device will be a row without a time: $out/build.log"
fi
"$PYTHON" -m ep_dispatcher doctor >"$out/doctor.txt" 2>&1
tail -n 3 "$out/doctor.txt"

if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then
  step "MPS is up already"
else
  step "MPS"
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY
  export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d || exit 1
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

step "benchmark"
left_s=$((budget_s - SECONDS - 20)) # pages and the way back take the rest
timeout --signal=INT $((left_s + 15)) "$PYTHON" -m ep_dispatcher bench run \
  --config configs/bench_one_gpu.yaml --out "$out" --budget "$left_s" --no-report --recover scripts/restart_mps.sh \
  ${rest[@]+"${rest[@]}"} 2>&1 | tee "$out/table.txt"
status=${PIPESTATUS[0]}

step "pages"
timeout 30 "$PYTHON" -m ep_dispatcher bench report "$out" --out "$out"
step "done"
exit "$status"
