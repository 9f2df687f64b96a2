#!/usr/bin/env bash
# All tests that need a GPU, on one GPU, in one call: a line for each part, and a log.
#
#   scripts/gpu_tests.sh [PART...]
#
# Parts: build kernels faults example windows rails gin doctor sanitize, which are the default, and
# training, which needs megatron-core and Transformer Engine.
# WORLDS     domains x ranks of each for gin (default: 2x1 4x1 2x2 2x4 4x2 8x1)
# TOOLS      for sanitize, side by side (default: memcheck initcheck racecheck synccheck)
# PYTHON     interpreter with torch, pybind11 and pytest (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if the wheel is not in that Python
# RESULTS    folder for logs and the table (default: runs/gpu_tests)
# Modules that are newer than every source are kept. Fails if any part did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh
RESULTS=${RESULTS:-runs/gpu_tests}
# shellcheck source=scripts/gpu_parts.sh
. scripts/gpu_parts.sh

ALL_PARTS=(build kernels faults example windows rails gin doctor sanitize)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0"
  exit
fi
(($# > 0)) || set -- "${ALL_PARTS[@]}"
ALL_WORLDS='2x1 4x1 2x2 2x4 4x2 8x1'
FAULT_WORLDS='2x1 4x1 2x2 2x4 8x1' # of them; those that tests/test_rail_gin_faults.py has
WORLDS=${WORLDS:-$ALL_WORLDS}
ALL_TOOLS='memcheck initcheck racecheck synccheck'
TOOLS=${TOOLS:-$ALL_TOOLS}
TESTS=("$PYTHON" -m pytest -q --maxfail 10 --timeout 60 -p no:cacheprovider)
SANITIZED=(tests/test_kernels.py tests/test_combine_gather.py tests/test_kernel_faults.py)
SIZES='round_equals or tiny or length or of_experts or of_tokens' # over half of test_kernels.py
SANITIZE_S=395 # of the whole part
OURS=(--kernel-name kernel_substring=_ZN2ep) # kernels of namespace ep

part_build() {
  check "native module" 600 bash -c '. scripts/shared_gpu.sh && build_native'
  check "kernel modules" 600 scripts/gpu_kernels.sh build
}
part_kernels() {
  check kernels 200 "${TESTS[@]}" tests/test_kernels.py
  check interference 90 "${TESTS[@]}" tests/test_bench_interference.py
}
part_faults() {
  check faults 120 "${TESTS[@]}" tests/test_kernel_faults.py tests/test_combine_gather.py
}
part_example() { check example 60 scripts/gpu_kernels.sh example; }

part_windows() { # processes, by the number of ranks
  need_mps windows || return
  local ranks
  for ranks in 4 2 8; do
    check "windows $ranks ranks" 200 "${TESTS[@]}" tests/test_device.py -k "${ranks}ranks"
  done
  check "native module, host" 120 "${TESTS[@]}" tests/test_native.py tests/test_c_abi*.py \
    tests/test_device_waits.py
  check "rows on two streams" 90 "${TESTS[@]}" tests/test_device_memory.py
  stop_mps
}

# part_rails: all ranks in one process; several such processes, each with time slices of its own
part_rails() {
  if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then # its blocks would not all find a place beside others
    check "rails without MPS" 600 env -u CUDA_MPS_PIPE_DIRECTORY -u CUDA_MPS_LOG_DIRECTORY \
      RESULTS="$RESULTS/rails" "$0" rails
    return
  fi
  local kernels=tests/test_rail_kernels.py whole=the_specification
  local rails=("${TESTS[@]}" --timeout 120)
  beside check "rails, routings" 400 "${rails[@]}" "$kernels" -k "$whole"
  beside check "rails, the rest" 400 "${rails[@]}" "$kernels" -k "not $whole"
  beside check "rails, memory" 400 "${rails[@]}" tests/test_rail_memory.py
  beside check "rails, faults" 400 "${rails[@]}" tests/test_rail_faults.py
  beside check "rails, worlds" 400 "${rails[@]}" tests/test_rail_{send,worlds}.py
  meet
}

part_gin() { # processes; a world of ranks after the other
  local world
  need_mps gin || return
  for world in $WORLDS; do
    check "rails, GIN $world" 150 "${TESTS[@]}" --timeout 120 tests/test_rail_gin.py -k "$world"
    [[ " $FAULT_WORLDS " != *" $world "* ]] || check "rails, GIN faults $world" 150 \
      "${TESTS[@]}" --timeout 120 tests/test_rail_gin_faults.py -k "$world"
  done
  stop_mps
}

part_doctor() {
  need_mps doctor || return
  check "doctor --nccl" 200 "${TESTS[@]}" --timeout 120 tests/test_doctor_nccl.py
  stop_mps
}

part_training() {
  check "graphs of layers" 300 "${TESTS[@]}" --timeout 120 tests/test_megatron_graphs.py
  check "streams of chunks" 200 "${TESTS[@]}" --timeout 120 tests/test_megatron_overlap_gpu.py
}

# under TOOL: `run` is how a program is run under it
under() {
  run=(compute-sanitizer --tool "$1" --error-exitcode 9)
  case $1 in
    initcheck) ;; # follows what other kernels write, so it must see them all
    # It counts a block's barriers from cuda::barrier objects, of which ours are none: told here.
    synccheck) run+=("${OURS[@]}" --num-cuda-barriers 256) ;;
    *) run+=("${OURS[@]}") ;;
  esac
}

# cases NAME TOOL WORD...: over tests marked for it, until the part's time is over. The log names each
# test, so that a run that was cut tells how far it came.
cases() {
  local name=$1 run
  under "$2"
  shift 2
  check "$name" $((until_s - SECONDS)) "${run[@]}" "${TESTS[@]}" -vv --durations 5 --timeout 300 \
    -m sanitize "$@"
}

# sanitize TOOL: over the C example, the rails and, but for initcheck, all marked tests
sanitize() {
  local tool=$1 run
  under "$tool"
  check "$tool example" 60 "${run[@]}" build/gpu_kernels/table_peers
  check "$tool rails" 200 env PYTHONPATH="$PWD" "${run[@]}" "$PYTHON" tests/rail_sanitize.py
  [[ $tool == initcheck ]] || cases "$tool" "$tool" "${SANITIZED[@]}"
}

# initcheck: its tests, a check a file and two for the largest. It takes longer for a case the more
# its process has seen: 3 s for one alone, 11 s each for 16.
initcheck() {
  local file name
  for file in "${SANITIZED[@]}"; do
    name=${file#tests/test_}
    name="initcheck ${name%.py}"
    if [[ $file == */test_kernels.py ]]; then
      beside cases "$name, sizes" initcheck "$file" -k "$SIZES"
      beside cases "$name, rest" initcheck "$file" -k "not ($SIZES)"
    else
      beside cases "$name" initcheck "$file"
    fi
  done
}

part_sanitize() {
  local tool until_s=$((SECONDS + SANITIZE_S))
  # The kernels share one launch here, so code may be loaded lazily; eager loading takes minutes.
  # Without the cache of torch, each tensor is an allocation whose end the tools can see.
  export CUDA_MODULE_LOADING=LAZY PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in $TOOLS; do
    beside sanitize "$tool"
    [[ $tool != initcheck ]] || initcheck
  done
  meet
  export CUDA_MODULE_LOADING=EAGER
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

for tool in $TOOLS; do
  if [[ " $ALL_TOOLS " != *" $tool "* ]]; then
    echo "TOOLS has $tool; tools: $ALL_TOOLS"
    exit 2
  fi
done
for world in $WORLDS; do # a part of a name would select the tests of others
  if [[ " $ALL_WORLDS " != *" $world "* ]]; then
    echo "WORLDS has $world; worlds: $ALL_WORLDS"
    exit 2
  fi
done
run_parts "${ALL_PARTS[*]} training" "$@"
