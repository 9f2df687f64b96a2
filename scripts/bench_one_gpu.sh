#!/usr/bin/env bash
# Peer comparison on one GPU, from build to table: ranks under MPS, equal SM budgets.
#
#   scripts/bench_one_gpu.sh [--out FOLDER] [--cells FILE] [--budget SECONDS] [--lines-only]
#                           [BENCH_ARGUMENT...]
#
# --out      folder for results.jsonl, report.md, report.html and logs (default: runs/one_gpu)
# --cells    what to measure, most telling first (default: configs/bench_one_gpu.yaml)
# --budget   of the whole script, build included (default: 530); what does not fit becomes a row
# --lines-only  no doctor and no report, which `ep-dispatcher bench report` makes on any machine
# The rest goes to `ep-dispatcher bench run`, for example --backends ep_dispatcher/device nccl_ep.
#
# PYTHON     interpreter with torch and pybind11 (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if its wheel is not in that Python; the peer's package
#            (nccl-extensions, with nccl4py and cuda-core) is used where it can be imported
# MPS that runs already is used; else it is started for the time of the script.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh

out=runs/one_gpu
cells=configs/bench_one_gpu.yaml
budget_s=530 pages_s=20
rest=()
while (($#)); do
  case $1 in
    --out | --cells | --budget)
      [[ ${2:-} && $2 != --* ]] || { echo "bench_one_gpu.sh: $1 needs a value" >&2; exit 2; } ;;
  esac
  case $1 in
    -h | --help) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --out) out=$2; shift 2 ;;
    --cells) cells=$2; shift 2 ;;
    --budget) budget_s=$2; shift 2 ;;
    --lines-only) pages_s=0; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done
[[ $budget_s =~ ^[1-9][0-9]*$ ]] ||
  { echo "bench_one_gpu.sh: --budget is '$budget_s'; it must be seconds" >&2; exit 2; }
[[ -f $cells ]] || { echo "bench_one_gpu.sh: --cells is $cells, which is no file" >&2; exit 2; }
nvidia-smi -L >/dev/null 2>&1 ||
  { echo "bench_one_gpu.sh: no GPU here; 'ep-dispatcher bench run' needs none" >&2; exit 2; }
mkdir -p "$out" || exit 2

# count_left: left_s is what the benchmark has; refuses where that is nothing
count_left() {
  left_s=$((budget_s - SECONDS - pages_s))
  ((left_s > 0)) && return
  echo "bench_one_gpu.sh: --budget $budget_s leaves no time to measure after $SECONDS s and $pages_s" \
    "for the pages; give more, or run it again: what was built stays" >&2
  exit 2
}
count_left
# Before a build of minutes: an option that nobody knows. --list ends it there.
((${#rest[@]} == 0)) ||
  "$PYTHON" -m ep_dispatcher bench run "${rest[@]}" --list >/dev/null || exit 2

step "native module"
build_native >"$out/build.log" 2>&1 ||
  echo "the build failed, so ep_dispatcher/device will be a row without a time: $out/build.log"
if ((pages_s)); then
  "$PYTHON" -m ep_dispatcher doctor >"$out/doctor.txt" 2>&1
  tail -n 3 "$out/doctor.txt"
fi

step "MPS"
start_mps || exit 1
recover=() # an MPS that was up before is left alone
[[ ! $mps_is_mine ]] || recover=(--recover scripts/restart_mps.sh)

step "benchmark"
count_left
timeout --signal=INT $((left_s + 15)) "$PYTHON" -m ep_dispatcher bench run --config "$cells" \
  --out "$out" --budget "$left_s" --no-report \
  ${recover[@]+"${recover[@]}"} \
  ${rest[@]+"${rest[@]}"} 2>&1 | tee "$out/table.txt"
status=${PIPESTATUS[0]}

if ((pages_s)); then
  step "pages"
  timeout 30 "$PYTHON" -m ep_dispatcher bench report "$out" --out "$out"
fi
step "done"
exit "$status"
