#!/usr/bin/env bash
# Gates and tests in a virtual environment of their own. Run it again at will: what is there is kept.
#
#   scripts/test.sh [--python VERSION] [--venv DIR] [--quick] [PYTEST_ARGUMENT...]
#
#   --python   interpreter to make the environment with, for example 3.12 (default: python3)
#   --venv     environment to make or use (default: .venv-test, or .venv-test-VERSION); a torch
#              that is there already is kept if it is 2.11 or later
#   --quick    without compiling CUDA and without tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=torch==2.13.0
OLDEST_NCCL=2.30.7
MAX_WORKERS=4 # many tests start several processes themselves

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit "$1"
}

# step TEXT: say what comes next and how long it has been
step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

# find_python VERSION: the interpreter of that version, wherever pyenv or the system keeps it
find_python() {
  local candidate
  for candidate in "python$1" "$(pyenv root 2>/dev/null)"/versions/"$1"*/bin/python; do
    if "$candidate" -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "test.sh: no Python $1 that is 3.11 or later was found; give one with --python" >&2
  return 1
}

version='' venv='' quick=''
while (($#)); do
  case $1 in
    --python) version=$2; shift 2 ;;
    --venv) venv=$2; shift 2 ;;
    --quick) quick=1; shift ;;
    -h | --help) usage 0 ;;
    *) break ;;
  esac
done
venv=${venv:-.venv-test${version:+-$version}}

if [[ ! -x $venv/bin/python ]]; then
  step "making $venv"
  interpreter=$(find_python "${version:-3}")
  "$interpreter" -m venv "$venv"
fi
python=$PWD/$venv/bin/python
[[ $venv != /* ]] || python=$venv/bin/python
export PATH=${python%/*}:$PATH

has_torch() {
  "$python" -c 'import torch; assert [int(n) for n in torch.__version__.split(".")[:2]] >= [2, 11]' \
    2>/dev/null
}

# has_nccl PACKAGE: whether that one is there and new enough
has_nccl() {
  "$python" - "$1" "$OLDEST_NCCL" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version

found, oldest = version(sys.argv[1]).split("."), sys.argv[2].split(".")
assert [int(n) for n in found[:3]] >= [int(n) for n in oldest]
PYTHON
}

# finish_compiling: wait for what was begun beside
finish_compiling() {
  [[ $compiling ]] || return 0
  step "waiting for the compilers"
  [[ ! -x $venv/bin/mypy ]] || mypy >/dev/null 2>&1 || true # the gate has what it kept then
  wait "$compiling" || true
  compiling=''
  trap - EXIT
}

# The gates' compilation, while pip waits for packages. They compile again what failed here, and say
# so. Their NCCL is not where pip finds it, else it would compile too.
compiling='' nccl=''
if command -v nvcc >/dev/null; then
  nccl=nvidia-nccl-cu$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  if [[ -z $quick ]]; then
    step "compiling for the gates, beside what follows"
    "$python" -m pip install -qq "setuptools>=77" "$(grep -o 'pybind11==[0-9.]*' pyproject.toml)"
    set -m # a group of its own, to end it with its compilers
    scripts/check.sh --compile >/dev/null 2>&1 &
    compiling=$!
    set +m
    trap 'kill -- -"$compiling" 2>/dev/null || true' EXIT
  fi
fi
if ! has_torch; then
  step "installing $TORCH"
  "$python" -m pip install -qq "$TORCH"
fi
# Only when they changed: pip would put back torch's own NCCL each time (see below).
if ! cmp -s pyproject.toml "$venv/.extras-installed"; then
  [[ ! $nccl ]] || ! has_nccl "$nccl" || finish_compiling # pip compiles too, as it finds NCCL
  step "installing ep_dispatcher with the extras megatron and dev"
  "$python" -m pip install -qq -e ".[megatron,dev]"
fi
# NCCL comes after everything else. A torch for CUDA pins its own, older one, so an install that
# looks at torch's needs puts that in place of ours, and the native module would not be compiled.
# Hence --no-deps too. torch then loads our libnccl.so.2, as it lies in the same folder; NCCL keeps
# its ABI within 2.x. What counts is the version that is there, not that it was installed once.
if [[ $nccl ]] && ! has_nccl "$nccl"; then
  step "installing NCCL $OLDEST_NCCL, to compile against"
  "$python" -m pip install -qq --no-deps "$nccl==$OLDEST_NCCL"
fi
finish_compiling
step "installing ep_dispatcher, with its native module where there are nvcc and NCCL"
"$python" -m pip install -qq --no-deps -e .
cp pyproject.toml "$venv/.extras-installed"

step "gates"
scripts/check.sh ${quick:+--quick}

step "tests, $("$python" --version)"
export OMP_NUM_THREADS=1
selected=()
[[ -z $quick ]] || selected=(-m "not slow")
# Files side by side, where they need no GPU; tests/conftest.py puts the long ones first.
if [[ ! -e /dev/nvidia0 ]]; then
  selected+=(-n auto --maxprocesses "$MAX_WORKERS" --dist loadfile --no-loadscope-reorder)
fi
exec "$python" -m pytest "${selected[@]}" ${CI:+--hypothesis-profile=ci} "$@"
