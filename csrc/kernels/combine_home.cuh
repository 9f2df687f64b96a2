// combine at the home rank: the ranks' partial rows of each token are summed into its output row.
// Loader, storer and crediter walk through the channel's tokens in ascending order.
#pragma once

#include "kernels/combine_group.cuh"

namespace ep {

// A token's contributors, ranks ascending, one (or two) a lane; read ahead of their use.
struct Contributors {
  uint64_t low, high;  // places `lane` and 32 + `lane`
  unsigned low_present, high_present, low_counting, high_counting;

  __device__ int count() const { return __popc(low_counting) + __popc(high_counting); }
  // The place of the first one that counts, at or after `place`; 64 if there is none.
  __device__ int next_counting(int place) const {
    const uint64_t all = static_cast<uint64_t>(high_counting) << 32 | low_counting;
    const uint64_t rest = place < 64 ? all >> place << place : 0;
    return rest == 0 ? 64 : __ffsll(static_cast<long long>(rest)) - 1;
  }
  __device__ uint64_t word(int place) const {
    const uint64_t from_low = __shfl_sync(~0u, low, place % 32);
    const uint64_t from_high = __shfl_sync(~0u, high, place % 32);
    return place < 32 ? from_low : from_high;
  }
};

__device__ __forceinline__ int rank_of_word(uint64_t word) {
  return static_cast<int>(word & kContributorRankMask);
}
__device__ __forceinline__ int index_of_word(uint64_t word) {
  return static_cast<int>(word >> kContributorRecordShift);
}

__device__ inline Contributors read_contributors(const CombineBlock& block, int64_t token) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_topk = block.args.plan.num_topk;
  const uint64_t* words = block.args.plan.contributor + token * num_topk;
  Contributors list;
  list.low = lane < num_topk ? __ldg(words + lane) : kNoContributor;
  list.high = 32 + lane < num_topk ? __ldg(words + 32 + lane) : kNoContributor;
  return list;
}

// Decides who is there; separate from the reads, which run ahead.
__device__ inline void settle(Contributors* list) {
  const bool low = list->low != kNoContributor;
  const bool high = list->high != kNoContributor;
  list->low_present = __ballot_sync(~0u, low);
  list->high_present = __ballot_sync(~0u, high);
  list->low_counting = __ballot_sync(~0u, low && (list->low & kContributorVoid) == 0);
  list->high_counting = __ballot_sync(~0u, high && (list->high & kContributorVoid) == 0);
}

// Walks through the tokens of the channel with one token read ahead.
class TokenCursor {
 public:
  __device__ explicit TokenCursor(const CombineBlock& block) : block_(block) {
    range_ =
        channel_tokens(block.args.plan.num_tokens, block.channel, block.context.shape.num_channels);
    if (range_.first < range_.end) {
      ahead_ = read_contributors(block, range_.first);
    }
  }

  __device__ bool next(int64_t* token, Contributors* list) {
    if (range_.first >= range_.end) {
      return false;
    }
    *token = range_.first++;
    *list = ahead_;
    if (range_.first < range_.end) {
      ahead_ = read_contributors(block_, range_.first);
    }
    settle(list);
    return true;
  }

 private:
  const CombineBlock& block_;
  TokenRange range_;
  Contributors ahead_{};
};

// Each lane waits for its contributors' partial rows.
__device__ inline bool wait_for_partials(const CombineBlock& block, const Contributors& list) {
  bool here = true;
  for (const uint64_t word : {list.low, list.high}) {
    if (word != kNoContributor && here && !mutated(block.context, Mutation::kCombineSkipPartial)) {
      const int rank = rank_of_word(word);
      const int index = index_of_word(word);
      here = wait_until(block.context, &block.shared->watch, block.full_here(rank, index),
                        block.passed(index),  // O2
                        {rank, EP_PHASE_COMBINE_PARTIAL, block.channel});
    }
  }
  here = __all_sync(~0u, here);
  __syncwarp();  // a vote orders no memory
  return here;
}

// Segment by segment, the terms of each by ascending rank.
__device__ inline bool load_token(const Group& group, StageLoader* loader, const Contributors& list,
                                  uint64_t policy) {
  const int count = list.count();
  for (int segment = 0; segment < group.shape.segments; ++segment) {
    int place = list.next_counting(0);
    for (int at = 0; at < count; ++at) {
      const uint64_t word = list.word(place);
      const int mark = (at == 0 ? kFirstTerm : 0) | (at + 1 == count ? kLastTerm : 0);
      const char* row = group.block.slot_here(rank_of_word(word), index_of_word(word));
      if (!loader->load(row, segment, mark, policy)) {
        return false;
      }
      place = list.next_counting(place + 1);
    }
  }
  return true;
}

// A token that nobody contributes to.
__device__ inline void zero_token(const CombineBlock& block, int64_t token, int64_t row_bytes) {
  if (block.args.segment_tokens > 0) {
    return;  // rail_return knows which sums there are
  }
  auto* out = reinterpret_cast<uint4*>(block.out_row(token, row_bytes));
  for (int at = static_cast<int>(threadIdx.x) % 32; at < row_bytes / 16; at += 32) {
    out[at] = make_uint4(0, 0, 0, 0);
  }
}

__device__ inline void load_partials(const Group& group, int64_t partial_bytes, int64_t out_bytes) {
  StageLoader loader(group, partial_bytes);
  TokenCursor cursor(group.block);
  const uint64_t policy = evict_normal_policy();
  int64_t token;
  Contributors list;
  while (cursor.next(&token, &list)) {
    if (!wait_for_partials(group.block, list)) {
      loader.drain();
      return;
    }
    fence_proxy_async();  // O2
    if (mutated(group.block.context, Mutation::kCombineSkipCredit) ||
        mutated(group.block.context, Mutation::kCombineSkipEntry)) {
      test_stall(group.block.context);
    }
    if (list.count() == 0) {
      zero_token(group.block, token, out_bytes);
    } else if (!load_token(group, &loader, list, policy)) {
      loader.drain();
      return;
    }
  }
  loader.finish();
}

// Stores the sums.
__device__ inline void store_tokens(const Group& group, int64_t out_bytes) {
  TokenCursor cursor(group.block);
  RingPosition position(kOutboxes);
  const uint64_t policy = evict_first_policy();
  const bool acts = threadIdx.x % 32 == 0;
  int unread = -1;
  int64_t token;
  Contributors list;
  while (cursor.next(&token, &list)) {
    char* out = group.block.out_row(token, out_bytes);
    for (int segment = 0; segment < group.shape.segments && list.count() > 0; ++segment) {
      const int at = position.at();
      if (!mbarrier_wait(group.watch, &group.shared->outbox_full[at], position.parity())) {
        bulk_wait_done<0>();
        return;
      }
      if (acts) {
        bulk_store_once(out + int64_t{segment} * group.shape.outbox_bytes, group.outbox(at),
                        Group::cut(segment, out_bytes, group.shape.outbox_bytes), policy);
        bulk_commit();
        bulk_wait_read<1>();
        if (unread >= 0) {
          mbarrier_arrive(&group.shared->outbox_empty[unread]);
        }
      }
      __syncwarp();
      unread = at;
      position.step();
    }
  }
  if (acts && unread >= 0) {
    bulk_wait_read<0>();
    mbarrier_arrive(&group.shared->outbox_empty[unread]);
  }
  bulk_wait_done<0>();
}

// --- gradients of the weights, and credits ---

// Slots of one pass over a token: reads their gradients, which lie behind the partial rows.
__device__ inline void read_gradients(const CombineBlock& block, int64_t token,
                                      const Contributors& list, int64_t grads_at) {
  const EpPlan& plan = block.args.plan;
  if (block.args.segment_tokens > 0 && list.count() == 0) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t* ranks = plan.dst_rank + token * plan.num_topk;
  const int32_t* rows = plan.dst_row + token * plan.num_topk;
  for (int first = 0; first < plan.num_topk; first += 32) {
    const int slot = first + lane;
    const int rank = slot < plan.num_topk ? __ldg(ranks + slot) : -1;
    const int row = slot < plan.num_topk ? __ldg(rows + slot) : -1;
    int index = -1;
    int place = list.next_counting(0);
    for (; place < 64; place = list.next_counting(place + 1)) {
      const uint64_t word = list.word(place);
      index = rank_of_word(word) == rank ? index_of_word(word) : index;
    }
    int earlier = 0;
    for (int other = 0; other < plan.num_topk; ++other) {
      earlier += __ldg(ranks + other) == rank && __ldg(rows + other) < row ? 1 : 0;
    }
    float grad = 0.0f;
    if (rank >= 0 && index >= 0) {
      grad = load_float(reinterpret_cast<const float*>(block.slot_here(rank, index) + grads_at) +
                        earlier);
    }
    if (slot < plan.num_topk) {
      block.weights_grad_row(token, grads_at)[slot] = grad;
    }
  }
}

// Tokens whose credits one fence serves, at most.
constexpr int kCreditBatch = 4;

// Gives slots back once their partial rows lie in shared memory.
class Crediter {
 public:
  __device__ Crediter(const Group& group, int64_t grads_at)
      : group_(group),
        block_(group.block),
        grads_at_(grads_at),
        position_(group.shape.num_stages) {}

  __device__ void run() {
    TokenCursor cursor(block_);
    int64_t token;
    Contributors list;
    while (cursor.next(&token, &list)) {
      if (!await_stages(list) || !await_void(list)) {
        return;
      }
      if (block_.args.weights_grad != nullptr) {
        read_gradients(block_, token, list, grads_at_);
      }
      first_ = pending_ == 0 ? token : first_;
      if (++pending_ == kCreditBatch) {
        release();
      }
    }
    release();
  }

 private:
  // Waits until all stages of a token are loaded; while there is nothing to do, gives credits.
  __device__ bool await_stages(const Contributors& list) {
    const int stages = list.count() * group_.shape.segments;
    for (int at = 0; at < stages; ++at) {
      uint64_t* full = &group_.shared->full[position_.at()];
      if (__any_sync(~0u, !mbarrier_try(full, position_.parity()))) {
        release();
        if (!mbarrier_wait(group_.watch, full, position_.parity())) {
          return false;
        }
      }
      mbarrier_arrive(&group_.shared->empty[position_.at()]);
      position_.step();
    }
    return true;
  }

  // Partial rows that do not count never pass through a stage.
  __device__ bool await_void(const Contributors& list) {
    if (list.low_present == list.low_counting && list.high_present == list.high_counting) {
      return true;
    }
    release();
    return wait_for_partials(block_, list);
  }

  __device__ void release() {
    const int num_topk = block_.args.plan.num_topk;
    const int words = pending_ * num_topk;
    __syncwarp();
    if (words > 0) {
      fence_sys();  // O3
    }
    for (int at = static_cast<int>(threadIdx.x) % 32; at < words; at += 32) {
      const uint64_t word = __ldg(block_.args.plan.contributor + first_ * num_topk + at);
      if (word != kNoContributor) {
        const int index = index_of_word(word);
        store_grown(block_.context, block_.free_at_expert(rank_of_word(word), index),
                    block_.passed(index));
      }
    }
    pending_ = 0;
    __syncwarp();
  }

  const Group& group_;
  const CombineBlock& block_;
  int64_t grads_at_;
  RingPosition position_;
  int64_t first_ = 0;  // of the pending tokens
  int pending_ = 0;
};

}  // namespace ep
