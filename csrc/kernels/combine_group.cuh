// combine, groups of warps: a loader, four summing warps and those that take the sums away, joined
// by two rings in shared memory. Expert and home role are both made of them.
//   loader --bulk load of one term's segment--> stage --full--> summing warps --empty--> loader
//   summing warps --sum of a segment--> outbox --full--> bulk store --empty--> summing warps
#pragma once

#include "kernels/combine.cuh"

namespace ep {

constexpr int kExpertGroups = 2;
constexpr int kHomeGroups = 1;
constexpr int kGroups = kExpertGroups + kHomeGroups;
constexpr int kSumWarps = 4;
constexpr int kSumThreads = 32 * kSumWarps;
constexpr int kMaxStages = 16;
constexpr int kOutboxes = 3;
constexpr int kSegmentLimitBytes = 8192;                          // of a stage and of an outbox
constexpr int kSumBudgetBytes = 222000;                           // shared memory of all groups
constexpr int kPasses = kSegmentLimitBytes / (16 * kSumThreads);  // vectors of a thread

// How rows are cut: terms of one size become sums of another.
struct SumShape {
  int segments;
  int stage_bytes;   // a segment of a term
  int outbox_bytes;  // the same elements of the sum
  int num_stages;    // of a group
};

EP_HOST_DEVICE constexpr SumShape sum_shape(int64_t hidden, int term_size, int sum_size) {
  const int64_t widest = max_of(term_size, sum_size);
  const int64_t segments = max_of(1, ceil_div(hidden * widest, kSegmentLimitBytes));
  const int64_t elements = align_up(ceil_div(hidden, segments), 8);
  const int64_t outboxes = kOutboxes * elements * sum_size;
  const int64_t stages = (kSumBudgetBytes / kGroups - outboxes) / (elements * term_size);
  return {static_cast<int>(segments), static_cast<int>(elements * term_size),
          static_cast<int>(elements * sum_size), static_cast<int>(min_of(stages, kMaxStages))};
}

// What a stage holds, for the summing warps.
enum StageMark : int { kFirstTerm = 1, kLastTerm = 2, kNoMoreTerms = 4 };

struct GroupShared {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t outbox_full[kOutboxes], outbox_empty[kOutboxes];
  int mark[kMaxStages];
};

// `readers` is the number of warps that give a stage back; each of their lanes arrives.
__device__ inline void init_group(GroupShared* shared, int readers) {
  for (int at = 0; at < kMaxStages; ++at) {
    mbarrier_init(&shared->full[at], 1);
    mbarrier_init(&shared->empty[at], 32 * readers);
  }
  for (int at = 0; at < kOutboxes; ++at) {
    mbarrier_init(&shared->outbox_full[at], kSumThreads);
    mbarrier_init(&shared->outbox_empty[at], 1);
  }
  fence_mbarrier_init();
}

// A place in a ring and the parity of its current round.
class RingPosition {
 public:
  __device__ explicit RingPosition(int size) : size_(size) {}

  __device__ int at() const { return at_; }
  __device__ uint32_t parity() const { return round_; }
  // The round before; before the first one it counts as complete.
  __device__ uint32_t previous_parity() const { return round_ ^ 1; }
  __device__ void step() {
    if (++at_ == size_) {
      at_ = 0;
      round_ ^= 1;
    }
  }

 private:
  int size_, at_ = 0;
  uint32_t round_ = 0;
};

// One group's view of the call.
struct Group {
  __device__ Group(const CombineBlock& combine_block, GroupShared* group_shared, char* memory,
                   SumShape sum, int group_index)
      : block(combine_block), shared(group_shared), shape(sum), index(group_index) {
    stages = memory + index * (kSumBudgetBytes / kGroups / 16 * 16);
    outboxes = stages + shape.num_stages * shape.stage_bytes;
    watch = &block.shared->watch;
  }

  __device__ char* stage(int at) const { return stages + at * shape.stage_bytes; }
  __device__ char* outbox(int at) const { return outboxes + at * shape.outbox_bytes; }
  // Bytes of segment `segment` of a row that is `row_bytes` long and is cut into `cut_bytes`.
  __device__ static uint32_t cut(int segment, int64_t row_bytes, int cut_bytes) {
    return static_cast<uint32_t>(min_of(cut_bytes, row_bytes - int64_t{segment} * cut_bytes));
  }

  const CombineBlock& block;
  GroupShared* shared;
  Watch* watch;
  SumShape shape;
  char* stages;
  char* outboxes;
  int index;
};

// Fills stages in order. A whole warp calls; lane 0 acts.
class StageLoader {
 public:
  __device__ StageLoader(const Group& group, int64_t row_bytes)
      : group_(group), row_bytes_(row_bytes), position_(group.shape.num_stages) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
  }

  __device__ bool load(const char* row, int segment, int mark, uint64_t policy) {
    GroupShared* shared = group_.shared;
    const int at = position_.at();
    if (!mbarrier_wait(group_.watch, &shared->empty[at], position_.previous_parity())) {
      return false;
    }
    if (lane_ == 0) {
      const uint32_t bytes = Group::cut(segment, row_bytes_, group_.shape.stage_bytes);
      shared->mark[at] = mark;
      mbarrier_expect(&shared->full[at], bytes);
      bulk_load(group_.stage(at), row + int64_t{segment} * group_.shape.stage_bytes, bytes,
                &shared->full[at], policy);
    }
    __syncwarp();
    loads_ += loads_ < group_.shape.num_stages ? 1 : 0;
    position_.step();
    return true;
  }

  // Tells the summing warps that no more comes. They may be gone by now, without waiting for the
  // last loads, if the block has to leave.
  __device__ void finish() {
    drain();
    if (mbarrier_wait(group_.watch, &group_.shared->empty[position_.at()],
                      position_.previous_parity()) &&
        lane_ == 0) {
      group_.shared->mark[position_.at()] = kNoMoreTerms;
      mbarrier_arrive(&group_.shared->full[position_.at()]);
    }
  }

  // A block must not end while the copy engine still writes into its memory.
  __device__ void drain() const {
    RingPosition position = position_;
    for (int passed = 0; passed < group_.shape.num_stages; ++passed) {
      const bool loaded = loads_ + passed >= group_.shape.num_stages;
      while (loaded &&
             !mbarrier_try(&group_.shared->full[position.at()], position.previous_parity())) {
      }
      position.step();
    }
  }

 private:
  const Group& group_;
  int64_t row_bytes_;
  RingPosition position_;
  int lane_;
  int loads_ = 0;  // up to the number of stages
};

// --- the summing warps ---

// Adds (or starts with) one term's segment.
template <EpDtype kTerm>
__device__ __forceinline__ void add_segment(const char* stage, int num_vectors, bool first,
                                            VectorSum<kTerm>* sum) {
  const int thread = static_cast<int>(threadIdx.x) % kSumThreads;
  const auto* vectors = reinterpret_cast<const uint4*>(stage);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int at = thread + pass * kSumThreads;
    if (at < num_vectors) {
      const uint4 raw = vectors[at];
      if (first) {
        sum[pass].start(raw);
      } else {
        sum[pass].add(raw);
      }
    }
  }
}

template <EpDtype kTerm, EpDtype kSum>
__device__ __forceinline__ void write_outbox(char* outbox, int num_vectors,
                                             const VectorSum<kTerm>* sum) {
  const int thread = static_cast<int>(threadIdx.x) % kSumThreads;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int at = thread + pass * kSumThreads;
    if (at < num_vectors) {
      store_rounded<kTerm, kSum>(outbox, at, sum[pass].value);
    }
  }
}

// A single term keeps its bits.
__device__ __forceinline__ void copy_to_outbox(char* outbox, const char* stage, int num_vectors) {
  const auto* from = reinterpret_cast<const uint4*>(stage);
  auto* to = reinterpret_cast<uint4*>(outbox);
  for (int at = static_cast<int>(threadIdx.x) % kSumThreads; at < num_vectors; at += kSumThreads) {
    to[at] = from[at];
  }
}

// Terms of a segment come one after another, segments of a row likewise; the last segment of a row
// may be shorter.
template <EpDtype kTerm, EpDtype kSum>
__device__ void sum_segments(const Group& group, int64_t row_bytes) {
  GroupShared* shared = group.shared;
  const int last = group.shape.segments - 1;
  const auto last_bytes = static_cast<int>(Group::cut(last, row_bytes, group.shape.stage_bytes));
  RingPosition in(group.shape.num_stages);
  RingPosition out(kOutboxes);
  VectorSum<kTerm> sum[kPasses];
  for (int segment = 0;;) {
    if (!mbarrier_wait(group.watch, &shared->full[in.at()], in.parity())) {
      return;
    }
    const int mark = shared->mark[in.at()];
    if (mark == kNoMoreTerms) {
      return;
    }
    const int num_vectors = (segment == last ? last_bytes : group.shape.stage_bytes) / 16;
    const char* stage = group.stage(in.at());
    const bool alone = kTerm == kSum && mark == (kFirstTerm | kLastTerm);
    if (!alone) {
      add_segment<kTerm>(stage, num_vectors, (mark & kFirstTerm) != 0, sum);
    }
    if ((mark & kLastTerm) != 0) {
      if (!mbarrier_wait(group.watch, &shared->outbox_empty[out.at()], out.previous_parity())) {
        return;
      }
      char* outbox = group.outbox(out.at());
      const bool early = mutated(group.block.context, Mutation::kCombineOutboxFirst);
      if (early) {
        mbarrier_arrive(&shared->outbox_full[out.at()]);
        test_stall(group.block.context);
      }
      if (alone) {
        copy_to_outbox(outbox, stage, num_vectors);
      } else {
        write_outbox<kTerm, kSum>(outbox, num_vectors, sum);
      }
      fence_proxy_async_shared();  // O5
      if (!early) {
        mbarrier_arrive(&shared->outbox_full[out.at()]);
      }
      out.step();
      segment = segment == last ? 0 : segment + 1;
    }
    mbarrier_arrive(&shared->empty[in.at()]);
    in.step();
  }
}

}  // namespace ep
