#!/usr/bin/env bash
# The gates: one line each, with its time. Uses the tools on PATH (extra `dev`).
#
#   scripts/check.sh [--quick | --compile]
#
#   --quick     without the compilation of CUDA
#   --compile   nothing but that; where nothing has changed since, the objects that it leaves are kept
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OLDEST_NCCL=2.30.7
MAX_LINES=500
SHOWN_LINES=40 # of a failed gate
part=${1:-}
failed=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# gate NAME COMMAND...: run it, print one line, and its output where it failed
gate() {
  local name=$1 verdict=FAIL start=${EPOCHREALTIME/[.,]/} tenths log
  log=$logs/$BASHPID
  shift
  set +e # in a condition, errexit would be off inside the subshell too
  (set -e; "$@") >"$log" 2>&1
  (($? != 0)) || verdict=ok
  set -e
  tenths=$(((${EPOCHREALTIME/[.,]/} - start) / 100000))
  printf '%-4s %-28s %4d.%d s\n' "$verdict" "$name" $((tenths / 10)) $((tenths % 10))
  if [[ $verdict == FAIL ]]; then
    head -n "$SHOWN_LINES" "$log"
    failed=1
  fi
}

# gate_beside NAME COMMAND...: the same on a core of its own; finish_beside prints its line
gate_beside() {
  (gate "$@" && exit "$failed") >"$logs/beside" &
  beside=$!
}

finish_beside() {
  wait "$beside" || failed=1
  cat "$logs/beside"
}

skip() { printf 'skip %-28s %s\n' "$1" "$2"; }

# tracked PATTERN...: files of the project, committed or about to be
tracked() {
  git ls-files -z --cached --others --exclude-standard -- "$@" | while IFS= read -r -d '' file; do
    [[ ! -f $file ]] || echo "$file"
  done
}

native_sources() { tracked 'csrc/*.h' 'csrc/*.c' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu'; }

check_clang_format() { native_sources | xargs -r clang-format --dry-run -Werror; }

check_file_sizes() {
  local too_long
  too_long=$(tracked '*.py' '*.pyi' '*.sh' 'csrc/*' | xargs wc -l |
    awk -v max=$MAX_LINES '$2 != "total" && $1 >= max { print $2 ": " $1 " lines, below " max " allowed" }')
  echo "$too_long"
  [[ -z $too_long ]]
}

# lizard knows no .cu and .cuh
check_function_sizes() {
  local file
  copy=$(mktemp -d)
  trap 'rm -r "$copy"' EXIT
  native_sources | while read -r file; do
    mkdir -p "$copy/$(dirname "$file")"
    cp "$file" "$copy/${file/%.cu*/.cpp}"
  done
  lizard -L 80 -C 15 -a 7 -w "$copy"
}

# Headers that kernels and host share must compile without CUDA; the C header as C.
check_host_headers() {
  local strict=(-Wall -Wextra -Werror -fsyntax-only -Icsrc)
  g++ -std=c++17 "${strict[@]}" -x c++ csrc/core/args.h
  g++ -std=c++17 "${strict[@]}" -x c++ csrc/core/window_layout.h
  gcc -std=c11 "${strict[@]}" -x c csrc/api/ep_dispatcher.h
}

# No path of one machine and no registry's host: what is committed must work anywhere.
check_no_machine_paths() {
  local found
  found=$(tracked | grep -v '^LICENSE$' | xargs grep -nIE \
    '(^|[^[:alnum:]._}-])/([w]ork|[r]oot|[h]ome|[o]pt|[t]mp)/|[p]ypi\.org|[p]ythonhosted\.org|[d]ownload\.pytorch') || true
  echo "$found"
  [[ -z $found ]]
}

cuda_major() { nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }

# fetch_nccl FOLDER REQUIREMENT: unpack a wheel of NCCL, once
fetch_nccl() {
  [[ ! -f $1/nvidia/nccl/include/nccl.h ]] || return 0
  local wheels
  wheels=$(mktemp -d)
  python -m pip download -qq --no-deps -d "$wheels" "$2"
  mkdir -p "$1"
  python -m zipfile -e "$wheels"/*.whl "$1"
  rm -r "$1/nvidia/nccl/lib"
  rm -r "$wheels"
}

# compile FOLDER: the whole native module against the NCCL unpacked there, GDAKI (posts by the GPU) in it
compile() {
  NCCL_HOME=$1/nvidia/nccl python setup.py -q build_ext --build-lib "$1/lib"
  ls "$1"/lib/ep_dispatcher/_C.*
  grep -aq nccl3gin5gdaki "$1"/lib/ep_dispatcher/_C.*
}

if [[ $part != --compile ]]; then
  gate_beside "mypy --strict" mypy
  gate "ruff check" ruff check .
  gate "ruff format" ruff format --check .
  gate "clang-format" check_clang_format
  gate "file sizes" check_file_sizes
  gate "function sizes in csrc" check_function_sizes
  gate "host-clean headers" check_host_headers
  gate "no machine paths" check_no_machine_paths
fi
if [[ $part == --quick ]]; then
  skip "CUDA" "left out by --quick"
elif ! command -v nvcc >/dev/null; then
  skip "CUDA" "nvcc is not on PATH, so nothing is compiled for sm_90 and sm_100"
else
  cache=$(python -c 'import sys; print(sys.prefix)')/nccl
  package=nvidia-nccl-cu$(cuda_major)
  for version in "$OLDEST_NCCL" newest; do
    requirement=$package
    [[ $version == newest ]] || requirement+="==$version"
    gate "fetch NCCL $version" fetch_nccl "$cache/$version" "$requirement"
    gate "sm_90, sm_100, NCCL $version" compile "$cache/$version"
    # The oldest has shown it with all optimization; the others show that the rest compiles too.
    [[ $(nvcc --help) != *--Ofast-compile* ]] || export EP_FAST_COMPILE=1
  done
fi
[[ $part == --compile ]] || finish_beside
exit "$failed"
