// combine at the home rank: sum the ranks' partial rows of each token.
#pragma once

#include "kernels/combine.cuh"

namespace ep {

// Partial rows as vectors of 16 bytes: kVectors of them make one vector of the output.
template <EpDtype kDtype, bool kExact>
struct PartialRow {
  static constexpr EpDtype kType = kExact ? EP_FLOAT32 : kDtype;
  static constexpr int kPerVector = Elements<kDtype>::kPerVector;
  static constexpr int kVectors = kPerVector / Elements<kType>::kPerVector;

  static __device__ __forceinline__ void unpack(const uint4* raw, float* values) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Elements<kType>::unpack(raw[i], values + i * Elements<kType>::kPerVector);
    }
  }

  static __device__ __forceinline__ void round(const float* values, uint4* raw) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      raw[i] = pack<kType>(values + i * Elements<kType>::kPerVector);
    }
  }
};

struct Contributor {
  int rank, index;
  bool present, counts;
};

__device__ inline Contributor read_contributor(const EpPlan& plan, int64_t token, int place) {
  const uint64_t word = place < plan.num_topk
                            ? __ldg(plan.contributor + token * plan.num_topk + place)
                            : kNoContributor;
  const bool present = word != kNoContributor;
  return {static_cast<int>(word & kContributorRankMask),
          static_cast<int>(word >> kContributorRecordShift), present,
          present && (word & kContributorVoid) == 0};
}

// Waits for the partial rows of a token and lists the addresses of those that count, ranks
// ascending. Returns their number, or -1 if the block has to leave.
__device__ inline int gather_terms(const CombineBlock& block, int64_t token, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
  for (int first = 0; first < block.args.plan.num_topk; first += 32) {
    const Contributor from = read_contributor(block.args.plan, token, first + lane);
    bool here = true;
    if (from.present && !mutated(block.context, Mutation::kCombineSkipPartial)) {
      here = wait_until(block.context, &block.shared->watch, block.full_here(from.rank, from.index),
                        block.passed(from.index),  // O2
                        {from.rank, EP_PHASE_COMBINE_PARTIAL, block.channel});
    }
    if (__any_sync(~0u, !here)) {
      return -1;
    }
    const unsigned counting = __ballot_sync(~0u, from.counts);
    if (from.counts) {
      const int place = count + __popc(counting & ((1u << lane) - 1));
      block.shared->term[warp][place] = block.slot_here(from.rank, from.index);
    }
    count += __popc(counting);
  }
  __syncwarp();
  return count;
}

// Gives the slots of a token's partial rows back to the ranks that filled them.
__device__ inline void return_credits(const CombineBlock& block, int64_t token) {
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int place = lane; place < block.args.plan.num_topk; place += 32) {
    const Contributor from = read_contributor(block.args.plan, token, place);
    if (from.present) {
      store_release_sys(block.free_at_expert(from.rank, from.index),
                        block.passed(from.index));  // O3
    }
  }
}

// Terms whose loads are in flight together, and output vectors of a lane likewise.
template <bool kExact>
constexpr int kTermsAtOnce = kExact ? 2 : 4;
constexpr int kVectorsAtOnce = 2;

// Adds up to kTermsAtOnce terms, from `base` on, of one lane's output vectors.
template <EpDtype kDtype, bool kExact>
__device__ __forceinline__ void add_terms(const char* const* terms, int count, int base, int vector,
                                          int num_vectors,
                                          float (*sum)[Elements<kDtype>::kPerVector]) {
  using Row = PartialRow<kDtype, kExact>;
  uint4 raw[kTermsAtOnce<kExact>][kVectorsAtOnce][Row::kVectors];
#pragma unroll
  for (int term = 0; term < kTermsAtOnce<kExact>; ++term) {
#pragma unroll
    for (int at = 0; at < kVectorsAtOnce; ++at) {
      if (base + term < count && vector + 32 * at < num_vectors) {
        const auto* row = reinterpret_cast<const uint4*>(terms[base + term]);
#pragma unroll
        for (int part = 0; part < Row::kVectors; ++part) {
          raw[term][at][part] = load_row(row + (vector + 32 * at) * Row::kVectors + part);
        }
      }
    }
  }
#pragma unroll
  for (int term = 0; term < kTermsAtOnce<kExact>; ++term) {
    if (base + term >= count) {
      break;
    }
#pragma unroll
    for (int at = 0; at < kVectorsAtOnce; ++at) {
      float values[Row::kPerVector];
      Row::unpack(raw[term][at], values);
#pragma unroll
      for (int i = 0; i < Row::kPerVector; ++i) {
        sum[at][i] = base + term == 0 ? values[i] : sum[at][i] + values[i];
      }
    }
  }
}

// Sums the listed partial rows of a token in their order and stores its row of the output.
template <EpDtype kDtype, bool kExact>
__device__ void sum_terms(const CombineBlock& block, int64_t token, int warp, int count) {
  constexpr int kPerVector = Elements<kDtype>::kPerVector;
  const auto num_vectors = static_cast<int>(block.args.hidden / kPerVector);
  auto* out = static_cast<uint4*>(block.args.out) + token * num_vectors;
  const uint64_t policy = evict_first_policy();
  const char* const* terms = block.shared->term[warp];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int vector = lane; vector < num_vectors; vector += 32 * kVectorsAtOnce) {
    float sum[kVectorsAtOnce][kPerVector] = {};
    for (int base = 0; base < count; base += kTermsAtOnce<kExact>) {
      add_terms<kDtype, kExact>(terms, count, base, vector, num_vectors, sum);
    }
#pragma unroll
    for (int at = 0; at < kVectorsAtOnce; ++at) {
      if (vector + 32 * at < num_vectors) {
        store_row_once(out + vector + 32 * at, pack<kDtype>(sum[at]), policy);
      }
    }
  }
}

// A sum of one rounded partial row is that row, bit for bit.
__device__ inline void copy_term(const CombineBlock& block, int64_t token, int warp,
                                 int row_bytes) {
  const auto* from = reinterpret_cast<const uint4*>(block.shared->term[warp][0]);
  auto* out = reinterpret_cast<uint4*>(static_cast<char*>(block.args.out) + token * row_bytes);
  const uint64_t policy = evict_first_policy();
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 4
  for (int vector = lane; vector < row_bytes / 16; vector += 32) {
    store_row_once(out + vector, load_row(from + vector), policy);
  }
}

// The place of a slot's row among its token's rows on the same rank.
__device__ inline int place_on_rank(const EpPlan& plan, int64_t first, int64_t at) {
  int place = 0;
  for (int64_t other = first; other < first + plan.num_topk; ++other) {
    place +=
        plan.dst_rank[other] == plan.dst_rank[at] && plan.dst_row[other] < plan.dst_row[at] ? 1 : 0;
  }
  return place;
}

// Reads the weights' gradients that lie behind the partial rows; dropped slots get 0.
__device__ inline void read_weight_grads(const CombineBlock& block, int64_t token,
                                         int64_t partial_bytes) {
  const EpPlan& plan = block.args.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = token * plan.num_topk;
  for (int slot = lane; slot < plan.num_topk; slot += 32) {
    const int rank = plan.dst_rank[first + slot];
    float grad = 0.0f;
    for (int place = 0; rank >= 0 && place < plan.num_topk; ++place) {
      const Contributor from = read_contributor(plan, token, place);
      if (from.present && from.rank == rank) {
        const auto* grads = reinterpret_cast<const volatile float*>(
            block.slot_here(rank, from.index) + partial_bytes);
        grad = grads[place_on_rank(plan, first, first + slot)];
      }
    }
    block.args.weights_grad[first + slot] = grad;
  }
}

// One home warp: every kHomeWarps-th token of the channel, ascending.
template <EpDtype kDtype, bool kExact>
__device__ void bring_home(const CombineBlock& block, int warp) {
  constexpr int kElementBytes = 16 / Elements<kDtype>::kPerVector;
  const TokenRange range =
      channel_tokens(block.args.plan.num_tokens, block.channel, block.context.shape.num_channels);
  for (int64_t token = range.first + warp; token < range.end; token += kHomeWarps) {
    const int count = gather_terms(block, token, warp);
    if (count < 0) {
      return;
    }
    if (mutated(block.context, Mutation::kCombineSkipCredit) ||
        mutated(block.context, Mutation::kCombineSkipEntry)) {
      test_stall(block.context);
    }
    if (count == 1 && !kExact) {
      copy_term(block, token, warp, static_cast<int>(block.args.hidden) * kElementBytes);
    } else {
      sum_terms<kDtype, kExact>(block, token, warp, count);
    }
    if (block.args.weights_grad != nullptr) {
      read_weight_grads(block, token, align_up(block.partial_bytes(kElementBytes), 16));
    }
    return_credits(block, token);
  }
}

}  // namespace ep
