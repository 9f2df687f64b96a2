#!/usr/bin/env bash
# The measurements behind docs/*.md that need one GPU, again: a line for each, JSON lines and logs.
#
#   scripts/gpu_record.sh PART...
#
# Parts of         need beside torch and NCCL
#   performance.md   kernels  peers (nccl-extensions)  eight (the same)  torch  products (the same)
#   overlap.md       layer  schedule  parity  trace  graphs  waits (megatron-core, Transformer Engine)
#                    together (layer and parity, for which ranks start once)
#                    beside (Transformer Engine, and what scripts/gpu_kernels.sh builds)
#   ablation.md      refusals  ablate (megatron-core)  hosts  host
# PYTHON     interpreter with torch, pybind11 and pytest (default: python3)
# NCCL_HOME  NCCL 2.30.7 or later, if the wheel is not in that Python
# RESULTS    folder for lines, logs and the table (default: runs/gpu_record)
# COMMIT     that the lines name, where the sources are no git checkout
# Where a part of overlap.md is cut or hangs, files *.stacks below RESULTS say where each rank was.
# Modules that are newer than every source are kept (scripts/gpu_tests.sh build). Nothing else should
# use the GPU meanwhile. Fails if any part did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh
RESULTS=${RESULTS:-runs/gpu_record}
# shellcheck source=scripts/gpu_parts.sh
. scripts/gpu_parts.sh

ALL_PARTS='kernels peers eight torch products layer schedule parity together trace graphs beside waits refusals ablate hosts host'
if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
  sed -n '2,20s/^# \{0,1\}//p' "$0"
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

PHASE_S=60 # that a phase of overlap.md may take: building a model, a step, all variants once
LAYER=(--config configs/overlap_layer.yaml --rounds 6 --chunks 2,4 --no-serial --limit "$PHASE_S"
  --out "$RESULTS/layer.jsonl")
SHARED=("${LAYER[@]}" --delayed --spans "$RESULTS/spans.json"
  --set model.shared_expert_ffn_hidden=2048)
PARITY=(--config configs/one_gpu_4ranks.yaml --steps 50
  --variants 'alltoall,allgather,ours,alltoall split,chunks' --seeds 2 3 4 --set model.num_layers=2
  --set train.micro_batch=2 --set model.aux_loss=0 --set ep_dispatcher.tier=device
  --limit "$PHASE_S" --out "$RESULTS/parity.jsonl")
# four NAME LIMIT_S WORD...: a module with four ranks under MPS
four() {
  local name=$1 limit_s=$2
  shift 2
  need_mps "$name" || return
  # Of each process: streams that share one wait for each other.
  CUDA_DEVICE_MAX_CONNECTIONS=8 check "$name" "$limit_s" "${FOUR[@]}" -m "$@"
  stop_mps
}
part_layer() {
  four layer 130 ep_dispatcher.profile.together layer "${LAYER[@]}" ++ layer "${SHARED[@]}"
}
part_parity() { four parity 150 ep_dispatcher.profile.parity "${PARITY[@]}"; }
part_together() {
  four together 210 ep_dispatcher.profile.together layer "${LAYER[@]}" ++ layer "${SHARED[@]}" ++ \
    parity "${PARITY[@]}"
}
# First what only the schedule can show; alltoall's losses are what ours are compared with.
part_schedule() {
  four schedule 180 ep_dispatcher.profile.schedule --config configs/overlap_layer.yaml \
    --set train.num_micro_batches=12 --variants 'alltoall 1f1b,ours 1f1b,ours,alltoall' \
    --rounds 3 --limit "$PHASE_S" --out "$RESULTS/schedule.jsonl"
}

# single NAME LIMIT_S COMMAND...: a check that is the only rank, with no launcher to start first
single() {
  local name=$1 limit_s=$2
  shift 2
  RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29671 \
    check "$name" "$limit_s" "$@"
}
# trace NAME OPTION...: of one rank on a GPU of its own, and its picture beside what comes next
trace() {
  local name=$1 out=$RESULTS/$1
  shift
  single "trace $name" 80 "$PYTHON" -m ep_dispatcher profile --same-batch --steps 2 --limit "$PHASE_S" \
    --out "$out" --config configs/overlap_layer.yaml "${ALONE[@]}" "$@"
  beside check "picture $name" 60 "$PYTHON" -m ep_dispatcher.profile.picture \
    "$out/trace_rank0.json" "$RESULTS/$name.png"
}
part_trace() {
  trace chunks --set ep_dispatcher.overlap.chunks=4
  trace shared --set ep_dispatcher.overlap.chunks=4 --set model.shared_expert_ffn_hidden=2048
  meet
}
# Where it hangs, its log ends with its stacks; else with the two lists of losses, which must be equal.
part_graphs() {
  local same='import json, sys; last = sys.stdin.read().splitlines()[-1]; print(last)
found = json.loads(last); sys.exit(not found["plain"] or found["plain"] != found["graphed"])'
  CUBLAS_WORKSPACE_CONFIG=:4096:8 single graphs 105 timeout -s ABRT 100 "$PYTHON" -W ignore \
    -X faulthandler tests/megatron_graph_rank.py chunks attn,moe_router,moe_preprocess
  check "graphs, same losses" 10 "$PYTHON" -c "$same" <"$RESULTS/graphs.log"
}
part_beside() {
  check beside 150 "$PYTHON" -m ep_dispatcher.profile.beside --experts cublaslt te --rounds 5 \
    --limit "$PHASE_S" --out "$RESULTS/beside.jsonl"
}
part_waits() {
  single waits 60 "$PYTHON" -m ep_dispatcher.profile.syncs --limit "$PHASE_S" --out "$RESULTS/waits.jsonl"
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
