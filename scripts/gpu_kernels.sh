#!/usr/bin/env bash
# The kernels on one GPU, from build to table, without NCCL: build, tests, sanitizer, timing.
#
#   scripts/gpu_kernels.sh [STEP...]     steps: build test example sanitize time; default all
#
# PYTHON   interpreter with torch, pybind11 and pytest (default: python3)
# RESULTS  folder for logs and results (default: runs/gpu_kernels)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-runs/gpu_kernels}
BUILD=build/gpu_kernels
FLAGS=(-std=c++17 -O3 -lineinfo -Icsrc -cudart=static -Xcompiler=-fPIC,-fvisibility=hidden
  -gencode=arch=compute_90,code=sm_90)
STEPS=${*:-build test example sanitize time}
mkdir -p "$BUILD" "$RESULTS"
export OMP_NUM_THREADS=4 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

wants() { [[ " $STEPS " == *" $1 "* ]]; }
step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

# compile NAME FLAG...: the Python module NAME; objects in parallel
compile() {
  local name=$1 source object includes
  shift
  includes=$("$PYTHON" -m pybind11 --includes)
  for source in csrc/kernels/*.cu csrc/api/*.cpp csrc/bindings/kernels.cpp \
    csrc/testing/kernels_module.cpp; do
    object=$BUILD/$name-$(basename "$source").o
    # shellcheck disable=SC2086
    nvcc "${FLAGS[@]}" "$@" $includes "-DEP_MODULE_NAME=$name" -Xptxas -v -c "$source" \
      -o "$object" >"$object.log" 2>&1 || echo "FAILED $source: $(grep -m3 error "$object.log")" &
  done
}

# link NAME: after all its objects are there
link() { nvcc "${FLAGS[@]}" -shared -o "$BUILD/$1.so" "$BUILD/$1"-*.o; }

if wants build; then
  step build
  rm -f "$BUILD"/*.o
  compile ep_kernels
  compile ep_kernels_mutated -DEP_TEST_MUTATIONS
  wait
  link ep_kernels && link ep_kernels_mutated || exit 1
  grep -hE 'Compiling entry|Used|spill' "$BUILD"/ep_kernels-*.log >"$RESULTS/ptxas.log"
  grep -c 'bytes spill' "$RESULTS/ptxas.log"
  grep -vE ' 0 bytes spill stores' "$RESULTS/ptxas.log" | grep spill && echo "SPILLS"
fi
if wants example; then
  step example
  gcc -std=c11 -Wall -Wextra -O2 -Icsrc -I"$(dirname "$(command -v nvcc)")/../include" \
    -c csrc/examples/table_peers.c -o "$BUILD/table_peers.o" &&
    nvcc "${FLAGS[@]}" -o "$BUILD/table_peers" "$BUILD/table_peers.o" \
      "$BUILD"/ep_kernels-{route,dispatch,combine,combine_gather}.cu.o "$BUILD/ep_kernels-ep_dispatcher.cpp.o" &&
    timeout 60 "$BUILD/table_peers"
fi
if wants test; then
  step test
  timeout 200 "$PYTHON" -m pytest -q --maxfail 10 --timeout 60 -p no:cacheprovider tests/test_kernels.py \
    tests/test_kernel_faults.py >"$RESULTS/test.log" 2>&1
  tail -25 "$RESULTS/test.log"
fi
if wants sanitize; then
  step sanitize
  for tool in memcheck racecheck synccheck initcheck; do
    options=()
    [[ $tool != synccheck ]] || options=(--num-cuda-barriers 65536)
    timeout 100 compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 "$PYTHON" -m pytest -q \
      --timeout 95 -p no:cacheprovider tests/test_kernels.py -k 'equals and 16-2-duplicates' \
      >"$RESULTS/$tool.log" 2>&1
    echo "$tool: rc $? $(tail -1 "$RESULTS/$tool.log")"
  done
fi
if wants time; then
  step time
  timeout 200 "$PYTHON" -m ep_dispatcher.bench.kernels_one_gpu --out "$RESULTS/one_domain.jsonl"
fi
step end
