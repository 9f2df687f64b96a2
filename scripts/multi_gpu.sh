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
# --cpu            the same steps over gloo with tiny shapes, N ranks: shows that the script works
# --commit         recorded where the source tree has no git folder to tell it
#
# PYTHON, NCCL_HOME as in scripts/shared_gpu.sh. NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

gpus=${1:-}
[[ $gpus =~ ^[1-9][0-9]*$ ]] || { sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 2; }
shift
per_gpu=1 out=runs/multi_gpu budget_s=530 cpu='' quick='' commit=()
while (($#)); do
  case $1 in
    --ranks-per-gpu) per_gpu=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --budget) budget_s=$2; shift 2 ;;
    --quick) quick=1; shift ;;
    --cpu) cpu=1; shift ;;
    --commit) commit=(--commit "$2"); shift 2 ;;
    *) echo "unknown option $1"; exit 2 ;;
  esac
done
ranks=$((gpus * per_gpu))
if [[ ! $cpu ]]; then
  found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  ((found >= gpus)) || { echo "$gpus GPUs are asked for, $found are here; --cpu needs none"; exit 2; }
  # Ranks are dealt out over all GPUs that are seen, so only those that were asked for may be.
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
fi
mkdir -p "$out"
for file in "$out"/{results,overlap}.jsonl; do # their lines would be taken for this run's
  [[ ! -f $file ]] || mv -f "$file" "$file.old"
done
lines=$out/results.jsonl
: >"$out/parts.txt"
failed=0

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
  [[ $verdict == ok ]] || failed=1
  # What was killed inside a kernel leaves MPS faulted.
  [[ $verdict != FAIL* ]] || scripts/restart_mps.sh
  printf '%-18s %-16s %4d s  %s\n' "$verdict" "$name" $((SECONDS - start)) \
    "$(grep -v '^ *$' "$log" 2>/dev/null | tail -n 1 | cut -c1-120)" | tee -a "$out/parts.txt"
}

cells=configs/bench_multi_gpu.yaml rounds=10 chunks=2,4
one_domain="${ranks}ranks"
case $ranks in
  2) domains=2x1 ;;
  4) domains='2x2 or 4x1' ;;
  *) domains='2x4 or 4x2 or 8x1' ;;
esac
if [[ $quick ]]; then
  cells=configs/bench_multi_gpu_quick.yaml rounds=3 chunks=2
  one_domain+=' and every_result' domains="(${domains%% *}) and every_result and plain"
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
else
  part build 300 bash -c ". scripts/shared_gpu.sh && build_native"
  part doctor 60 "$PYTHON" -m ep_dispatcher doctor
  if ((per_gpu > 1)); then
    export NCCL_MAX_CTAS=16 # blocks of all ranks must fit on the GPU beside ours
    start_mps || exit 1
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
    --recover scripts/restart_mps.sh
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
timeout 60 "$PYTHON" -m ep_dispatcher.bench.targets "$lines" "$out/overlap.jsonl" --ranks "$ranks" \
  --out "$out/targets.json" || failed=1
cat "$out/parts.txt"
exit "$failed"
