// combine at the expert rank: sum a token's local rows and push one partial row to its home.
#pragma once

#include "kernels/combine_home.cuh"

namespace ep {

constexpr int kExpertWarps = 8;

// Waits until the slot of the ring that this record takes is free.
__device__ inline bool wait_for_slot(const CombineBlock& block, const Record& record) {
  const EpContext& context = block.context;
  Watch* watch = &block.shared->watch;
  if (record.opens_ring) {
    if (mutated(context, Mutation::kCombineSkipEntry)) {
      return true;
    }
    const uint64_t* ready =
        block.peers.at<uint64_t>(context.ep_rank, context.window.combine_ready) + record.source;
    return wait_until(context, watch, ready, watch->epoch,  // O4
                      {record.source, EP_PHASE_COMBINE_READY, block.channel});
  }
  if (mutated(context, Mutation::kCombineSkipCredit)) {
    return true;
  }
  return wait_until(context, watch, block.free_here(record.source, record.index),
                    block.passed(record.index - block.depth),  // O3
                    {record.source, EP_PHASE_COMBINE_CREDIT, block.channel});
}

// Sums the record's rows into its slot; one lane's share, a vector at a time.
template <EpDtype kDtype, bool kExact>
__device__ void sum_rows(const CombineBlock& block, const int32_t* rows, int num_rows, char* slot) {
  using Partial = PartialRow<kDtype, kExact>;
  const auto num_vectors = static_cast<int>(block.args.hidden / Partial::kPerVector);
  const auto* from = static_cast<const uint4*>(block.args.expert_out);
  auto* to = reinterpret_cast<uint4*>(slot);
  const uint64_t policy = evict_first_policy();
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 2
  for (int vector = lane; vector < num_vectors; vector += 32) {
    const uint4 raw = load_row_once(from + int64_t{rows[0]} * num_vectors + vector, policy);
    if (num_rows == 1 && !kExact) {
      store_row(to + vector, raw);
      continue;
    }
    VectorSum<kDtype> sum;
    sum.start(raw);
    for (int row = 1; row < num_rows; ++row) {
      sum.add(load_row_once(from + int64_t{rows[row]} * num_vectors + vector, policy));
    }
    uint4 partial[Partial::kVectors];
    Partial::round(sum.value, partial);
#pragma unroll
    for (int part = 0; part < Partial::kVectors; ++part) {
      store_row(to + vector * Partial::kVectors + part, partial[part]);
    }
  }
}

// One expert warp: every kExpertWarps-th record of the channel.
template <EpDtype kDtype, bool kExact>
__device__ void push_partials(const CombineBlock& block, int warp) {
  constexpr int kElementBytes = 16 / Elements<kDtype>::kPerVector;
  const EpPlan& plan = block.args.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t grads_at = align_up(block.partial_bytes(kElementBytes), 16);
  RecordCursor cursor(block, warp, kExpertWarps);
  for (Record record; cursor.next(&record);) {
    const int num_rows = static_cast<int>(plan.record_header[record.record] & kRecordRowsMask);
    const int32_t* rows = plan.record_row + int64_t{record.record} * block.record_stride;
    if (!wait_for_slot(block, record)) {
      return;
    }
    uint64_t* full = block.full_at_home(record.source, record.index);
    if (mutated(block.context, Mutation::kCombineFlagFirst)) {
      store_release_sys(full, block.passed(record.index));
      test_stall(block.context);
    }
    char* slot = block.slot_at_home(record.source, record.index);
    if (num_rows > 0) {
      sum_rows<kDtype, kExact>(block, rows, num_rows, slot);
    }
    if (block.args.row_weights_grad != nullptr) {
      for (int row = lane; row < num_rows; row += 32) {
        reinterpret_cast<float*>(slot + grads_at)[row] = block.args.row_weights_grad[rows[row]];
      }
    }
    __syncwarp();
    if (lane == 0) {
      store_release_sys(full, block.passed(record.index));  // O1
    }
  }
}

}  // namespace ep
