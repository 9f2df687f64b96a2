#!/usr/bin/env bash
# Everything for several GPUs of one host in one call: build, tests, benchmark beside the peers,
# overlap, and a table with the targets beside. One rank on each GPU.
#
#   scripts/multi_gpu.sh N [--ranks-per-gpu R] [--out FOLDER] [--budget SECONDS] [--quick] [--cpu]
#                          [--commit HASH]
#
# N                GPUs to use
# --ranks-per-gpu  several ranks share each GPU under MPS; for trying the script on one GPU
# --out            folder for results.jsonl, report.md, report.html, targets.json and logs
#                  (default: runs/multi_gpu)
# --budget         seconds for all of it (default: 530); parts that do not fit are left out and say so
# --quick          every part, with one cell of two backends and few tests: about two minutes
# --cpu            no GPU: tests, benchmark, overlap and report over gloo with tiny shapes, N ranks
# --commit         recorded where the source tree has no git folder to tell it
#
# PYTHON, NCCL_HOME as in scripts/shared_gpu.sh. NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

# wrong MESSAGE: say what was wrong with the call, and end.
wrong() {
  echo "multi_gpu.sh: $1" >&2
  exit 2
}
# whole NAME VALUE LEAST: end unless the value is a whole number, LEAST or more.
whole() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] && (($2 >= $3)) ||
    wrong "$1 is '$2'; it must be a whole number, $3 or more"
}

# usage CODE: the words at the top, then end.
usage() {
  sed -n '2,18s/^# \{0,1\}//p' "$0"
  exit "$1"
}

gpus=${1:-}
[[ $gpus ]] || usage 2
for word in "$@"; do
  [[ $word != -h && $word != --help ]] || usage 0
done
whole N "$gpus" 1
shift
per_gpu=1 out=runs/multi_gpu budget_s=530 cpu='' quick='' commit=()
while (($#)); do
  case $1 in
    --quick) quick=1; shift; continue ;;
    --cpu) cpu=1; shift; continue ;;
    --ranks-per-gpu | --out | --budget | --commit) ;;
    *) wrong "unknown option $1; without arguments the script says which there are" ;;
  esac
  [[ ${2:-} && $2 != --* ]] || wrong "$1 needs a value"
  case $1 in
    --ranks-per-gpu) per_gpu=$2 ;;
    --out) out=$2 ;;
    --budget) budget_s=$2 ;;
    --commit) commit=(--commit "$2") ;;
  esac
  shift 2
done
whole --ranks-per-gpu "$per_gpu" 1
whole --budget "$budget_s" 60
ranks=$((gpus * per_gpu))
"$PYTHON" -c 'import torch, pytest, ep_dispatcher' 2>/dev/null ||
  wrong "$PYTHON cannot import torch, pytest and ep_dispatcher; set PYTHON to one that can"
if [[ ! $cpu ]]; then
  found=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') # CUDA_VISIBLE_DEVICES counts
  ((found >= gpus)) || wrong "$gpus GPUs are asked for, $found are here; --cpu needs none"
  # Ranks are dealt out over all GPUs that are seen, so only those that were asked for may be.
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
  CUDA_VISIBLE_DEVICES=$(cut -d, -f "1-$gpus" <<<"$CUDA_VISIBLE_DEVICES")
  export CUDA_VISIBLE_DEVICES
fi
mkdir -p "$out" || exit 2
for file in "$out"/{results,overlap}.jsonl; do # their lines would be taken for this run's
  [[ ! -f $file ]] || mv -f "$file" "$file.old"
done
lines=$out/results.jsonl
: >"$out/parts.txt"
failed=0

# targets: the table of targets; fails where our own dispatch or combine has no time.
targets() {
  timeout 60 "$PYTHON" -m ep_dispatcher.bench.targets "$lines" "$out/overlap.jsonl" --ranks "$ranks" \
    --out "$out/targets.json"
}

# part NAME LIMIT_S COMMAND...: run it within its limit and what is left of the budget; one line.
part() {
  local name=$1 limit_s=$2 start=$SECONDS verdict=ok
  local log=$out/${name// /_}.log left_s=$((budget_s - SECONDS - 10))
  shift 2
  : >"$log"
  if ((left_s < 5)); then
    verdict='left out: no time'
  else
    ((limit_s < left_s)) || limit_s=$left_s
    timeout --signal=INT -k 5 "$limit_s" "$@" >"$log" 2>&1 || verdict="FAIL ($?)"
  fi
  # Tests that were all skipped have shown nothing.
  [[ $verdict != ok || $name != tests* ]] || grep -q '[0-9] passed' "$log" || verdict='FAIL (none ran)'
  # A benchmark goes on past a backend that fails; peers may, ours may not.
  [[ $verdict != ok || $name != bench ]] || targets 2>>"$log" >/dev/null || verdict='FAIL (ours)'
  [[ $verdict == ok ]] || failed=1
  # What was killed inside a kernel leaves MPS faulted; one that this script did not start stays.
  [[ $verdict != FAIL* || ! $mps_is_mine ]] || scripts/restart_mps.sh
  printf '%-18s %-16s %4d s  %s\n' "$verdict" "$name" $((SECONDS - start)) \
    "$(grep -v '^ *$' "$log" 2>/dev/null | tail -n 1 | fold -s -w 120 | head -n 1)" | tee -a "$out/parts.txt"
}

recover=() # a GPU for each rank needs no MPS
cells=configs/bench_multi_gpu.yaml rounds=10 chunks=2,4
one_domain="${ranks}ranks"
case $ranks in
  2) domains=2x1 ;;
  4) domains='2x2 or 4x1' ;;
  *) domains='2x4 or 4x2 or 8x1' ;;
esac
if [[ $quick ]]; then
  cells=configs/bench_multi_gpu_quick.yaml rounds=3 chunks=2
  one_domain+=' and every_result' domains="($domains) and every_result and plain"
fi
tests=("$PYTHON" -m pytest -q --maxfail 3 --timeout 120 -p no:cacheprovider)
bench=("$PYTHON" -m ep_dispatcher bench run --config "$cells" --out "$out"
  --no-report ${commit[@]+"${commit[@]}"})
torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node "$ranks" --master-port 0
  --rdzv-backend c10d --rdzv-endpoint localhost:0)

if [[ $cpu ]]; then
  tiny=(ranks="$ranks" num_tokens=64 hidden=64 num_topk=2 num_experts=$((ranks * 2)) dtype=float32)
  part tests 120 "${tests[@]}" tests/test_multi_process.py
  sed 's#ep_dispatcher/device#ep_dispatcher/reference#' "$cells" >"$out/cells.yaml"
  part bench 200 "${bench[@]}" --config "$out/cells.yaml" --device cpu --set "${tiny[@]}" num_sms=8 time_limit_s=60 \
    --backends ep_dispatcher/reference torch/all_to_all nccl_ep
  if "$PYTHON" -c 'import megatron.core' 2>/dev/null; then
    part overlap 80 "${torchrun[@]}" -m ep_dispatcher.profile.layer --config configs/tiny_cpu.yaml \
      --set model.num_layers=1 --set model.num_experts=$((ranks * 2)) --set parallel.ranks_per_node="$ranks" \
      --set parallel.expert="$ranks" --rounds 3 --chunks 2 --out "$out/overlap.jsonl"
  else
    echo "overlap: not run, megatron-core is not installed" | tee -a "$out/parts.txt"
  fi
else
  part build 300 bash -c ". scripts/shared_gpu.sh && build_native"
  part doctor 60 "$PYTHON" -m ep_dispatcher doctor
  if ((per_gpu > 1)); then
    export NCCL_MAX_CTAS=16 # blocks of all ranks must fit on the GPU beside ours
    start_mps || wrong "MPS did not start; nvidia-cuda-mps-control -d says why"
    [[ ! $mps_is_mine ]] || recover=(--recover scripts/restart_mps.sh)
  else
    export CUDA_DEVICE_MAX_CONNECTIONS=32 # streams must not wait for each other by chance
  fi
  part links 60 "$PYTHON" -m ep_dispatcher.bench.gpu_links --gpus "$gpus" --out "$lines"
  case $ranks in
    2 | 4 | 8) part "tests one domain" 120 "${tests[@]}" tests/test_device.py -k "$one_domain" ;;
    *) echo "tests one domain: not run, they are for 2, 4 and 8 ranks" | tee -a "$out/parts.txt" ;;
  esac
  left_s=$((budget_s * 4 / 5 - SECONDS)) # the fifth that stays is for overlap, domains and report
  ((left_s < 280)) || left_s=280
  ((left_s > 20)) || left_s=20
  part bench $((left_s + 15)) "${bench[@]}" --budget "$left_s" --set ranks="$ranks" \
    ${recover[@]+"${recover[@]}"}
  part overlap 80 "${torchrun[@]}" -m ep_dispatcher.profile.layer \
    --config configs/overlap_layer.yaml --set parallel.ranks_per_node="$ranks" \
    --set parallel.expert="$ranks" --set parallel.ranks_share_gpu="$( ((per_gpu > 1)) && echo true ||
      echo false)" --rounds "$rounds" --chunks "$chunks" --out "$out/overlap.jsonl"
  case $ranks in
    2 | 4 | 8) part "tests domains" 100 "${tests[@]}" tests/test_rail_gin.py -k "$domains" ;;
    *) echo "tests domains: not run, they are for 2, 4 and 8 ranks" | tee -a "$out/parts.txt" ;;
  esac
fi
part report 60 "$PYTHON" -m ep_dispatcher bench report "$out" --out "$out"
targets || failed=1
if [[ -f $out/overlap.log ]]; then
  echo "One layer, ranks: $ranks, ms: without overlap (ours), in chunks that overlap, the same on one stream (serial)"
  grep -E '^[a-z0-9 ]+ forward ' "$out/overlap.log" | sed 's/  difference .*//'
fi
cat "$out/parts.txt"
exit "$failed"
