#!/usr/bin/env bash
# The kernels on one GPU without processes and without NCCL at run time: build, example, timing.
#
#   scripts/gpu_kernels.sh [STEP...]     steps: build example time; default all
#
# PYTHON     interpreter with torch, pybind11 and pytest (default: python3)
# NCCL_HOME  NCCL's headers, if its wheel is not in that Python
# RESULTS    folder for logs and results (default: runs/gpu_kernels)
# Modules that are newer than every source are kept. The tests are in scripts/gpu_tests.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-runs/gpu_kernels}
BUILD=build/gpu_kernels
FLAGS=(-std=c++17 -O3 -lineinfo -Icsrc -cudart=static -Xcompiler=-fPIC,-fvisibility=hidden
  -gencode=arch=compute_90,code=sm_90)
ALL_STEPS='build example time'
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit
fi
for step in "$@"; do
  if [[ " $ALL_STEPS " != *" $step "* ]]; then
    echo "no step is called $step; steps: $ALL_STEPS"
    exit 2
  fi
done
STEPS=${*:-$ALL_STEPS}
mkdir -p "$BUILD" "$RESULTS"
export OMP_NUM_THREADS=4 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

wants() { [[ " $STEPS " == *" $1 "* ]]; }
step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

# is_new FILE: there, and newer than every source
is_new() { [[ -f $1 && -z $(find csrc -newer "$1" -type f -print -quit) ]]; }

# compile NAME FLAG...: the Python module NAME; objects in parallel
compile() {
  local name=$1 source object includes
  shift
  includes=$("$PYTHON" -c 'import pybind11, sysconfig as s
print("-I" + pybind11.get_include(), "-I" + s.get_path("include"),
      "-I" + s.get_path("platlib") + "/nvidia/nccl/include")')
  [[ -z ${NCCL_HOME:-} ]] || includes="-I$NCCL_HOME/include $includes"
  for source in csrc/kernels/*.cu csrc/api/*.cpp csrc/bindings/{kernels,rail}.cpp \
    csrc/testing/kernels_module.cpp; do
    object=$BUILD/$name-$(basename "$source").o
    # shellcheck disable=SC2086
    nvcc "${FLAGS[@]}" "$@" $includes "-DEP_MODULE_NAME=$name" -Xptxas -v -c "$source" \
      -o "$object" >"$object.log" 2>&1 || echo "FAILED $source: $(grep -m3 error "$object.log")" &
  done
}

# link NAME: after all its objects are there
link() { nvcc "${FLAGS[@]}" -shared -o "$BUILD/$1.so" "$BUILD/$1"-*.o; }

build() {
  if is_new "$BUILD/ep_kernels.so" && is_new "$BUILD/ep_kernels_mutated.so"; then
    echo "kept what is there"
    return
  fi
  rm -f "$BUILD"/*.o
  compile ep_kernels
  compile ep_kernels_mutated -DEP_TEST_MUTATIONS
  wait
  link ep_kernels && link ep_kernels_mutated || return 1
  grep -hE 'Compiling entry|Used|spill' "$BUILD"/ep_kernels-*.log >"$RESULTS/ptxas.log"
  echo "functions: $(grep -c 'bytes spill' "$RESULTS/ptxas.log"), with spills:" \
    "$(grep spill "$RESULTS/ptxas.log" | grep -vc ' 0 bytes spill stores')"
}

# A C program over the C ABI: needs the objects of the build, or the program from an earlier one.
example() {
  local objects=("$BUILD"/ep_kernels-*.cu.o "$BUILD/ep_kernels-ep_dispatcher.cpp.o")
  if ! is_new "$BUILD/table_peers"; then
    nvcc -Xcompiler=-std=c11,-Wall,-Wextra -O2 -Icsrc -c csrc/examples/table_peers.c \
      -o "$BUILD/table_peers.o" &&
      nvcc "${FLAGS[@]}" -o "$BUILD/table_peers" "$BUILD/table_peers.o" "${objects[@]}" || return 1
  fi
  timeout 60 "$BUILD/table_peers"
}

if wants build; then
  step build
  build || exit 1
fi
if wants example; then
  step example
  example || exit 1
fi
if wants time; then
  step time
  timeout 200 "$PYTHON" -m ep_dispatcher.bench.kernels_one_gpu --out "$RESULTS/one_domain.jsonl"
fi
