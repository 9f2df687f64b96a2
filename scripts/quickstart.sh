#!/usr/bin/env bash
# Makes a virtual environment, installs ep_dispatcher, trains a small MoE. Run it again at will:
# what is there is kept, and a run that was stopped goes on.
#
#   scripts/quickstart.sh [--python PYTHON] [--venv DIR] [TRAIN_OPTION...]
#
#   --python   interpreter, 3.11 or later (default: python3)
#   --venv     environment to make or use (default: .venv)
#   others     go to `ep-dispatcher train`, for example --data my_text/ or --steps 200
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=torch==2.13.0

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit "$1"
}

step() { printf '== %s (%d s)\n' "$1" "$SECONDS"; }

fail() {
  echo "quickstart.sh: $1" >&2
  exit 1
}

interpreter=python3 venv=.venv
while (($#)); do
  case $1 in
    --python) interpreter=${2:?--python needs an interpreter}; shift 2 ;;
    --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
    -h | --help) usage 0 ;;
    *) break ;;
  esac
done

if [[ ! -x $venv/bin/python ]]; then
  "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$interpreter is no Python 3.11 or later; give one with --python"
  step "making the virtual environment $venv"
  "$interpreter" -m venv "$venv"
fi
python=$venv/bin/python

if ! "$python" -c 'import torch' 2>/dev/null; then
  step "installing $TORCH"
  # Where that very version cannot be had, the package's own requirement picks one below.
  "$python" -m pip install -q "$TORCH" || step "no $TORCH for $("$python" --version); taking another"
fi
step "installing ep_dispatcher with the extra megatron"
"$python" -m pip install -q -e ".[megatron]"

step "training: configs/tiny_cpu.yaml"
"$venv/bin/ep-dispatcher" train --config configs/tiny_cpu.yaml "$@"

cat <<TEXT
== done (${SECONDS} s). Next:
   $venv/bin/ep-dispatcher train --config configs/tiny_cpu.yaml --data YOUR_TEXT --out runs/mine
   $venv/bin/ep-dispatcher doctor      what this machine can run
   docs/training.md                    all settings, GPUs, SLURM
TEXT
