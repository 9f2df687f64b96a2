// combine by gathering, shared pieces: a block's view of the call, a token's terms in order, the
// ring of stages of one warp, and the running sums.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/numeric.cuh"

namespace ep {

// Few warps with long stages: what a term costs beside its sum is shared by more bytes (measured
// against 12 warps of 2 KiB stages and 16: docs/performance.md).
constexpr int kGatherWarps = 8;
constexpr int kGatherStages = 7;  // of each warp
constexpr int kGatherPasses = 7;  // vectors of 16 bytes that a lane holds
constexpr int kGatherStageBytes = 16 * 32 * kGatherPasses;
constexpr int kGatherSharedBytes = kGatherWarps * kGatherStages * kGatherStageBytes;

// What all warps of a block share.
struct GatherShared {
  Watch watch;
  const char* rows_at[EP_MAX_RANKS];    // row 0 of each rank's expert rows
  const float* grads_at[EP_MAX_RANKS];  // likewise the gradients of its rows' weights
  uint64_t full[kGatherWarps * kGatherStages];
  uint64_t term[kGatherWarps][EP_MAX_TOPK];  // see order_terms
};

// One warp's view of the call.
struct Gatherer {
  __device__ Gatherer(const EpCombineArgs& combine_args, int channel, const char* memory,
                      GatherShared* block_shared)
      : args(combine_args), shared(block_shared) {
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    num_topk = args.plan.num_topk;
    row_bytes = args.hidden * (args.dtype == EP_FLOAT32 ? 4 : 2);
    segments = static_cast<int>(ceil_div(row_bytes, kGatherStageBytes));
    last_bytes = static_cast<uint32_t>(row_bytes - int64_t{segments - 1} * kGatherStageBytes);
    stages = keep(shared_address(memory) + warp * kGatherStages * kGatherStageBytes);
    full = keep(shared_address(shared->full + warp * kGatherStages));
    terms = keep(shared_address(shared->term[warp]));
    const TokenRange share =
        channel_tokens(args.plan.num_tokens, channel, args.context.shape.num_channels);
    first_token = static_cast<int>(share.first) + warp;
    end_token = static_cast<int>(share.end);
  }

  __device__ uint32_t segment_bytes(int segment) const {
    return segment + 1 == segments ? last_bytes : kGatherStageBytes;
  }

  const EpCombineArgs& args;
  GatherShared* shared;
  uint32_t stages, full;  // addresses in shared memory
  uint32_t terms;         // likewise: of the token whose loads are being started
  uint32_t last_bytes;    // of a row's last segment
  int64_t row_bytes;
  int first_token, end_token;  // this warp's is every kGatherWarps-th
  int segments, warp, lane, num_topk;
};

// Where one slot of a token went; rank -1: nowhere.
struct Target {
  int rank, row;
};

__device__ inline Target read_target(const Gatherer& own, int token, int slot) {
  if (slot >= own.num_topk || token >= own.end_token) {
    return {-1, -1};
  }
  const int64_t at = int64_t{token} * own.num_topk + slot;
  return {__ldg(own.args.plan.dst_rank + at), __ldg(own.args.plan.dst_row + at)};
}

// A term: the address of its row, a multiple of 16, and in the bits below it how it ends sums.
enum TermMark : uint32_t { kEndsRank = 1, kEndsToken = 2, kAlone = 4, kTermMarks = 15 };

// Writes a slot's term to its place among the token's terms: rank, then row, ascending. No two
// slots have the same; those that went nowhere have no place. `low` and `high` are the targets of
// slots `lane` and 32 + `lane`, `mine` is one of them.
__device__ inline void place_term(const Gatherer& own, const Target& low, const Target& high,
                                  const Target& mine, int count) {
  int place = 0;
  bool ends_rank = true;
  for (int slot = 0; slot < own.num_topk; ++slot) {
    const int rank = __shfl_sync(~0u, slot < 32 ? low.rank : high.rank, slot % 32);
    const int row = __shfl_sync(~0u, slot < 32 ? low.row : high.row, slot % 32);
    const bool same = rank == mine.rank;
    place += rank >= 0 && (rank < mine.rank || (same && row < mine.row)) ? 1 : 0;
    ends_rank = ends_rank && !(same && row > mine.row);
  }
  if (mine.rank >= 0) {
    const char* row = own.shared->rows_at[mine.rank] + mine.row * own.row_bytes;
    own.shared->term[threadIdx.x / 32][place] =
        reinterpret_cast<uint64_t>(row) | (ends_rank ? kEndsRank : 0) |
        (place + 1 == count ? kEndsToken : 0) | (count == 1 ? kAlone : 0);
  }
}

// Writes the terms of a token in the order of its sum; returns how many there are.
__device__ inline int order_terms(const Gatherer& own, const Target& low, const Target& high) {
  const int count =
      __popc(__ballot_sync(~0u, low.rank >= 0)) + __popc(__ballot_sync(~0u, high.rank >= 0));
  __syncwarp();  // the last token's terms have been read
  place_term(own, low, high, low, count);
  if (own.num_topk > 32) {
    place_term(own, low, high, high, count);
  }
  __syncwarp();
  return count;
}

// Starts the loads of a warp's terms: token by token, segment by segment, terms in order. Runs
// ahead of the sums by all stages. A whole warp calls; lane 0 acts.
class TermLoader {
 public:
  __device__ explicit TermLoader(const Gatherer& gatherer) : own_(gatherer) {
    policy_ = evict_first_policy();
    next_token_ = own_.first_token;
    ahead_ = read_target(own_, next_token_, own_.lane);
  }

  // Fills all stages.
  __device__ void start() {
    for (int stage = 0; stage < kGatherStages; ++stage) {
      load(stage);
    }
  }

  __device__ bool empty() const { return in_flight_ == 0; }

  // The mark of the oldest term in flight, which leaves the list of those.
  __device__ uint32_t take_mark() {
    const uint32_t mark = marks_ & kTermMarks;
    marks_ >>= kMarkBits;
    --in_flight_;
    return mark;
  }

  // The token of the term that `stage` held last.
  __device__ int token(int stage) const { return __shfl_sync(~0u, stage_token_, stage); }

  // Starts the next load, into `stage`, if there is one.
  __device__ void load(int stage) {
    if (at_ == count_ && !next_segment()) {
      return;
    }
    const uint64_t term = load_shared_word(own_.terms + 8 * at_);
    marks_ |= (static_cast<uint32_t>(term) & kTermMarks) << (kMarkBits * in_flight_);
    stage_token_ = own_.lane == stage ? token_ : stage_token_;
    if (own_.lane == 0) {
      const uint32_t barrier = own_.full + 8 * stage;
      const auto* from = reinterpret_cast<const char*>(term & ~uint64_t{kTermMarks}) + offset_;
      mbarrier_expect(barrier, bytes_);
      bulk_load(own_.stages + stage * kGatherStageBytes, from, bytes_, barrier, policy_);
    }
    ++at_;
    ++in_flight_;
  }

  // Brings the last gradients home.
  __device__ void finish() { store_grad(); }

 private:
  static constexpr int kMarkBits = 4;
  static_assert(kMarkBits * kGatherStages <= 32, "marks of all stages fit into a word");

  // Begins the next segment of the token, or the first of the next token that has terms.
  __device__ bool next_segment() {
    at_ = 0;
    if (count_ > 0 && ++segment_ < own_.segments) {
      offset_ += kGatherStageBytes;
      bytes_ = own_.segment_bytes(segment_);
      return true;
    }
    segment_ = 0;
    offset_ = 0;
    bytes_ = own_.segment_bytes(0);
    count_ = 0;
    while (count_ == 0 && next_token_ < own_.end_token) {
      next_token();
    }
    return count_ > 0;
  }

  __device__ void next_token() {
    token_ = next_token_;
    next_token_ += kGatherWarps;
    const Target low = ahead_;
    const Target high = read_target(own_, token_, 32 + own_.lane);
    ahead_ = read_target(own_, next_token_, own_.lane);
    count_ = order_terms(own_, low, high);
    if (own_.args.weights_grad != nullptr) {
      move_grads(low, high);
    }
    if (count_ == 0) {
      auto* out = reinterpret_cast<uint4*>(static_cast<char*>(own_.args.out) +
                                           int64_t{token_} * own_.row_bytes);
      for (int64_t at = own_.lane; at < own_.row_bytes / 16; at += 32) {
        out[at] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The gradients of the first 32 slots are stored a token later, so that nothing waits for them.
  __device__ void move_grads(const Target& low, const Target& high) {
    store_grad();
    grad_ = grad_of(low);
    grad_at_ = int64_t{token_} * own_.num_topk + own_.lane;
    if (32 + own_.lane < own_.num_topk) {
      own_.args.weights_grad[grad_at_ + 32] = grad_of(high);
    }
  }

  __device__ float grad_of(const Target& target) const {
    return target.rank < 0 ? 0.0f : load_float(own_.shared->grads_at[target.rank] + target.row);
  }

  __device__ void store_grad() const {
    if (grad_at_ >= 0 && own_.lane < own_.num_topk) {
      own_.args.weights_grad[grad_at_] = grad_;
    }
  }

  const Gatherer& own_;
  uint64_t policy_;
  Target ahead_;  // slot `lane` of next_token_
  int64_t grad_at_ = -1;
  float grad_ = 0.0f;
  int token_ = 0, next_token_;
  int count_ = 0, at_ = 0, segment_ = 0;  // terms of the token; the next one to load
  uint32_t offset_ = 0, bytes_ = 0;       // of the segment
  int in_flight_ = 0;
  uint32_t marks_ = 0;   // of the terms in flight, the oldest in the lowest bits
  int stage_token_ = 0;  // of the stage with this lane's number
};

// Stores this lane's part of a segment.
__device__ __forceinline__ void store_vectors(char* to, const uint4* vectors, int num_vectors) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    if (lane + 32 * pass < num_vectors) {
      store_once(reinterpret_cast<uint4*>(to) + lane + 32 * pass, vectors[pass]);
    }
  }
}

// The sums of one segment of one token: of the rank at hand, and of the ranks before it.
template <EpDtype kDtype, bool kExact>
class SegmentSum {
 public:
  using Vector = VectorSum<kDtype>;

  // Adds a term; `ends_rank` if it is the last of its rank.
  __device__ __forceinline__ void add(const uint4* raw, bool ends_rank) {
    if (!rank_open_ && ends_rank) {
      add_to(total_, raw, total_open_);  // one term: rounding it changes nothing
      total_open_ = true;
      return;
    }
    add_to(rank_, raw, rank_open_);
    rank_open_ = !ends_rank;
    if (ends_rank) {
      close_rank();
    }
  }

  // Stores the rounded sum; the next term starts anew.
  __device__ __forceinline__ void take(char* to, int num_vectors) {
    uint4 rounded[kGatherPasses];
#pragma unroll
    for (int pass = 0; pass < kGatherPasses; ++pass) {
      rounded[pass] = pack<kDtype>(total_[pass].value);
    }
    store_vectors(to, rounded, num_vectors);
    total_open_ = false;
  }

 private:
  __device__ __forceinline__ static void add_to(Vector* sum, const uint4* raw, bool open) {
    if (open) {
#pragma unroll
      for (int pass = 0; pass < kGatherPasses; ++pass) {
        sum[pass].add(raw[pass]);
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < kGatherPasses; ++pass) {
        sum[pass].start(raw[pass]);
      }
    }
  }

  // The rank's sum, rounded unless exact, becomes a term of the total.
  __device__ __forceinline__ void close_rank() {
#pragma unroll
    for (int pass = 0; pass < kGatherPasses; ++pass) {
      if constexpr (!kExact) {
        rank_[pass].start(pack<kDtype>(rank_[pass].value));
      }
#pragma unroll
      for (int i = 0; i < Vector::kPerVector; ++i) {
        const float value = rank_[pass].value[i];
        total_[pass].value[i] = total_open_ ? total_[pass].value[i] + value : value;
      }
    }
    total_open_ = true;
  }

  Vector rank_[kGatherPasses], total_[kGatherPasses];
  bool rank_open_ = false, total_open_ = false;
};

}  // namespace ep
