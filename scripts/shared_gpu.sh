# shellcheck shell=bash
# Source this where several processes share one GPU: environment, native module, MPS.
#
#   PYTHON     interpreter with torch and pybind11 (default: python3)
#   NCCL_HOME  NCCL 2.30.7 or later, if the wheel is not in that Python

PYTHON=${PYTHON:-python3}
export NCCL_MULTI_RANK_GPU_ENABLE=1 # several ranks may share a GPU
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export CUDA_MODULE_LOADING=EAGER # loading lazily can deadlock against a kernel that waits
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

# build_native: the module _C, unless one is there that is newer than every source.
build_native() {
  local built
  built=$("$PYTHON" -c 'import ep_dispatcher._C as module; print(module.__file__)' 2>/dev/null)
  [[ -n $built && -z $(find csrc setup.py -newer "$built" -type f -print -quit) ]] ||
    "$PYTHON" setup.py -q build_ext --inplace
}

# start_mps: MPS for as long as the script runs; one that is up already is used and left alone.
# Without it, kernels of two processes never run at the same time, and wait for each other in vain.
# mps_is_mine tells which.
mps_is_mine=''
start_mps() {
  [[ -z ${CUDA_MPS_PIPE_DIRECTORY:-} ]] || return 0
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY
  export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  if ! nvidia-cuda-mps-control -d; then
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY # or the next call would take it for up
    return 1
  fi
  mps_is_mine=1
  trap stop_mps EXIT
}

# stop_mps: end what start_mps started; one that was up before stays.
stop_mps() {
  [[ $mps_is_mine ]] || return 0
  trap - EXIT
  mps_is_mine=''
  echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
