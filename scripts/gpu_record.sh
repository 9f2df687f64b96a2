#!/usr/bin/env bash
# The measurements behind docs/*.md that need one GPU, again: a line for each, JSON lines and logs.
#
#   scripts/gpu_record.sh PART...
#
# Parts of         need beside torch and NCCL
#   performance.md   kernels  peers (nccl-extensions)  eight (the same)  torch  products (the same)
#   overlap.md       layer  schedule  trace  beside  waits (megatron-core, Transformer Engine)
#   ablation.md      refusals  ablate (megatron-core)  hosts  host
# PYTHON     interpreter with torch, pybind11 and pytest (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if the wheel is not in that Python
# RESULTS    folder for lines, logs and the table (default: runs/gpu_record)
# COMMIT     that the lines name, where the sources are no git checkout
# Modules that are newer than every source are kept (scripts/gpu_tests.sh build). Nothing else should
# use the GPU meanwhile. Fails if any part did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh
RESULTS=${RESULTS:-runs/gpu_record}
# shellcheck source=scripts/gpu_parts.sh
. scripts/gpu_parts.sh

ALL_PARTS='kernels peers eight torch products layer schedule trace beside waits refusals ablate hosts host'
if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
  sed -n '2,17s/^# \{0,1\}//p' "$0"
  exit $(($# == 0 ? 2 : 0))
fi
FOUR=("$PYTHON" -m torch.distributed.run --nproc-per-node 4)
ALONE=(--set parallel.ranks_per_node=1 --set parallel.expert=1 --set parallel.ranks_share_gpu=false
  --set model.num_experts=16)
NAMED=()
[[ -z ${COMMIT:-} ]] || NAMED=(--commit "$COMMIT")

# bench NAME LIMIT_S ARGUMENT...: scripts/bench_one_gpu.sh with that budget
bench() {
  local name=$1 limit_s=$2
  shift 2
  check "$name" $((limit_s + 20)) scripts/bench_one_gpu.sh --out "$RESULTS/$name" --budget "$limit_s" \
    --lines-only "${NAMED[@]}" "$@"
}

part_kernels() {
  CUDA_DEVICE_MAX_CONNECTIONS=32 check kernels 200 "$PYTHON" -m ep_dispatcher.bench.kernels_one_gpu \
    --rounds 25 --out "$RESULTS/kernels.jsonl"
}
part_peers() {
  bench peers 300 --strict \
    --set usage=true 'interference=[ep_dispatcher/device]' time_limit_s=40 \
    --backends ep_dispatcher/device nccl_ep/static torch/all_to_all megatron/alltoall nccl_ep
}
part_eight() {
  bench eight 110 --cells configs/bench_one_gpu_8ranks.yaml --strict --set time_limit_s=40 \
    --backends ep_dispatcher/device torch/all_to_all nccl_ep/static megatron/alltoall
}
part_torch() {
  bench torch 84 --set 'interference=[]' usage=true time_limit_s=60 --backends torch/all_to_all
}
part_products() { bench products 84 --cells configs/bench_one_gpu_products.yaml; }
part_refusals() { bench refusals 150 --cells configs/bench_one_gpu_refusals.yaml; }

part_layer() {
  need_mps layer || return
  export CUDA_DEVICE_MAX_CONNECTIONS=8 # of each process: streams that share one wait for each other
  local layer=(-m ep_dispatcher.profile.layer --config configs/overlap_layer.yaml --rounds 6
    --chunks 2,4 --no-serial --out "$RESULTS/layer.jsonl")
  check layer 60 "${FOUR[@]}" "${layer[@]}"
  check "layer, shared expert" 70 "${FOUR[@]}" "${layer[@]}" --delayed --spans "$RESULTS/spans.json" \
    --set model.shared_expert_ffn_hidden=2048
  stop_mps
}
part_schedule() {
  need_mps schedule || return
  CUDA_DEVICE_MAX_CONNECTIONS=8 check schedule 120 "${FOUR[@]}" -m ep_dispatcher.profile.schedule \
    --config configs/overlap_layer.yaml --set train.num_micro_batches=12 \
    --out "$RESULTS/schedule.jsonl"
  stop_mps
}

# trace NAME OPTION...: of one rank on a GPU of its own, and its picture
trace() {
  local name=$1 out=$RESULTS/$1
  shift
  check "trace $name" 80 "$PYTHON" -m ep_dispatcher profile --same-batch --steps 2 --out "$out" \
    --config configs/overlap_layer.yaml "${ALONE[@]}" "$@"
  check "picture $name" 40 "$PYTHON" -m ep_dispatcher.profile.picture "$out/trace_rank0.json" \
    "$RESULTS/$name.png"
}
part_trace() {
  trace chunks --set ep_dispatcher.overlap.chunks=4
  trace shared --set ep_dispatcher.overlap.chunks=4 --set model.shared_expert_ffn_hidden=2048
}
part_beside() {
  local experts
  for experts in cublaslt te; do
    check "beside, $experts" 100 "$PYTHON" -m ep_dispatcher.profile.beside --experts "$experts" \
      --out "$RESULTS/beside.jsonl"
  done
}
part_waits() {
  check waits 60 "$PYTHON" -m torch.distributed.run --nproc-per-node 1 -m ep_dispatcher.profile.syncs \
    --out "$RESULTS/waits.jsonl"
}

part_ablate() {
  need_mps ablate || return
  check ablate 160 scripts/ablate.sh configs/one_gpu_4ranks.yaml --steps 50 --limit 48 \
    --dispatchers alltoall ep_dispatcher allgather --out "$RESULTS/ablate" "${NAMED[@]}"
  stop_mps
}
part_hosts() {
  check "multi_gpu.sh, 4 ranks" 190 scripts/multi_gpu.sh 1 --ranks-per-gpu 4 --quick --budget 165 \
    --out "$RESULTS/hosts" "${NAMED[@]}"
}
part_host() {
  check "multi_gpu.sh, 1 rank" 160 scripts/multi_gpu.sh 1 --budget 138 --out "$RESULTS/host" \
    "${NAMED[@]}"
}

run_parts "$ALL_PARTS" "$@"
