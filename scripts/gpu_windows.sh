#!/usr/bin/env bash
# Tests of the device tier between processes that share one GPU: build, MPS, tests.
#
#   scripts/gpu_windows.sh [PYTEST_ARGUMENT...]
#
# PYTHON     interpreter with torch, pybind11 and pytest (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if the wheel is not in that Python
# A module that was built already and is newer than every source is kept.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
export NCCL_MULTI_RANK_GPU_ENABLE=1 # several ranks may share a GPU
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export CUDA_MODULE_LOADING=EAGER # loading lazily can deadlock against a kernel that waits
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

step "native module"
built=$("$PYTHON" -c 'import ep_dispatcher._C as module; print(module.__file__)' 2>/dev/null)
if [[ -z $built || -n $(find csrc setup.py -newer "$built" -type f -print -quit) ]]; then
  "$PYTHON" setup.py -q build_ext --inplace || exit 1
fi
"$PYTHON" -c 'from ep_dispatcher import native; print(native.capabilities())'

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

step "tests"
timeout "${LIMIT_S:-400}" "$PYTHON" -m pytest tests/test_device.py tests/test_native.py "$@"
