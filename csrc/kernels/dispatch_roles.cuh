// dispatch, the warps that send: templated over where rows lie (Rows), so that rows which other
// domains have sent here are forwarded by the same code. dispatch.cu has the whole picture.
#pragma once

#include "kernels/dispatch_duplicate.cuh"
#include "kernels/ready.cuh"

namespace ep {

__device__ inline Entry entry_of(const EpDispatchArgs& args) {
  return {args.context.window.dispatch_ready, args.recv_x_offset, args.recv_weights_offset,
          EP_PHASE_DISPATCH_READY, EP_PHASE_WEIGHTS};
}

// Zeroes one row of this rank from a stage that holds zeros.
__device__ inline void zero_row(const Sender& sender, int64_t row) {
  const EpDispatchArgs& args = sender.args;
  char* to =
      sender.peers.at<char>(sender.context.ep_rank, args.recv_x_offset) + row * args.row_bytes;
  for (int item = 0; item < sender.shape.segments; ++item) {
    bulk_store(to + sender.segment_offset(item), sender.stage, sender.segment_bytes(item));
  }
  if (args.recv_weights_offset >= 0) {
    sender.peers.at<float>(sender.context.ep_rank, args.recv_weights_offset)[row] = 0.0f;
  }
}

// This warp's part of rows [first, end): spread over all warps of the rank, then over lanes.
__device__ inline void zero_range(const Sender& sender, int64_t first, int64_t end) {
  const int64_t workers = int64_t{sender.context.shape.num_channels} * sender.shape.warps;
  const int64_t worker = int64_t{sender.channel} * sender.shape.warps + sender.warp;
  for (int64_t row = first + worker + sender.lane * workers; row < end; row += 32 * workers) {
    zero_row(sender, row);
  }
}

// Zeroes the rows of recv_x that no copy goes to.
__device__ inline void zero_unused_rows(const Sender& sender) {
  const EpPlan& plan = sender.args.plan;
  auto* words = reinterpret_cast<uint4*>(sender.stage);
  for (int word = sender.lane; word < sender.shape.segment_bytes / 16; word += 32) {
    words[word] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async_shared();
  __syncwarp();
  for (int base = 0; base < sender.context.num_local_experts; base += 32) {
    const int own = base + sender.lane;
    int64_t first = 0;
    int64_t end = 0;
    if (own < sender.context.num_local_experts) {
      first = plan.expert_offsets[own] + plan.tokens_per_expert[own];
      end = plan.expert_offsets[own] + plan.padded_tokens_per_expert[own];
    }
    unsigned padded = __ballot_sync(~0u, end > first);
    while (padded != 0) {
      const int expert = __ffs(static_cast<int>(padded)) - 1;
      padded &= padded - 1;
      zero_range(sender, __shfl_sync(~0u, first, expert), __shfl_sync(~0u, end, expert));
    }
  }
  zero_range(sender, plan.totals[0], sender.args.recv_rows);
  bulk_commit();
  bulk_wait_read<0>();  // O4
  __syncwarp();
}

// Where the rows and weights of tokens lie. In one domain: in the caller's tensors.
struct OwnRows {
  static constexpr bool kMayWait = false;  // for another rank, and so give up

  // nullptr: the token is sent nowhere. A whole warp calls.
  __device__ const char* row(const Sender& sender, int64_t token) {
    return static_cast<const char*>(sender.args.x) + token * sender.args.row_bytes;
  }
  __device__ float weight(const Sender& sender, int64_t token, int slot) {
    const float* weights = sender.args.topk_weights;
    return weights == nullptr ? 0.0f : __ldg(weights + token * sender.num_topk + slot);
  }
};

// Starts the load of an item's segment into its stage; of a token that is sent nowhere, some bytes.
template <class Rows>
__device__ inline void load_item(const Sender& sender, Rows* rows, int item) {
  constexpr uint32_t kFewBytes = 16;
  const char* row = rows->row(sender, sender.token_of(item));
  if (sender.lane != 0) {
    return;
  }
  uint64_t* barrier = sender.full + item % kStagesPerWarp;
  uint32_t bytes = sender.segment_bytes(item);
  const char* from = row + sender.segment_offset(item);
  if (Rows::kMayWait && row == nullptr) {
    bytes = kFewBytes;
    from = sender.peers.at<char>(sender.context.ep_rank, 0);
  }
  mbarrier_expect(barrier, bytes);
  bulk_load(sender.stage_of(item), from, bytes, barrier, sender.policy);
}

// A load depends on no other rank, so this wait needs no deadline.
__device__ __forceinline__ void wait_for_load(const Sender& sender, int item) {
  const auto parity = static_cast<uint32_t>(item / kStagesPerWarp % 2);
  while (!mbarrier_try(sender.full + item % kStagesPerWarp, parity)) {
  }
}

// Where one copy goes, and its weight; `further` if the receiver makes the copy.
struct Target {
  int rank;
  int row;
  float weight;
  bool further;
};

// Whether another slot of the token has a lower row on the same rank.
__device__ __forceinline__ bool is_further_copy(const Sender& sender, int64_t token, int rank,
                                                int row) {
  const EpPlan& plan = sender.args.plan;
  bool further = false;
  for (int64_t at = token * sender.num_topk; at < (token + 1) * sender.num_topk; ++at) {
    further = further || (__ldg(plan.dst_rank + at) == rank && __ldg(plan.dst_row + at) < row);
  }
  return further;
}

template <class Rows>
__device__ __forceinline__ Target read_target(const Sender& sender, Rows* rows, int64_t token,
                                              int slot) {
  if (slot >= sender.num_topk) {
    return {-1, 0, 0.0f, false};
  }
  const int64_t at = token * sender.num_topk + slot;
  const int rank = __ldg(sender.args.plan.dst_rank + at);
  const int row = __ldg(sender.args.plan.dst_row + at);
  return {rank, row, rank < 0 ? 0.0f : rows->weight(sender, token, slot),
          sender.shape.duplicators > 0 && is_further_copy(sender, token, rank, row)};
}

__device__ __forceinline__ void store_copy(const Sender& sender, int item, const Target& target) {
  if (target.rank < 0) {
    return;
  }
  if (!target.further) {
    char* to = sender.shared->rows_at[target.rank] + target.row * sender.args.row_bytes +
               sender.segment_offset(item);
    bulk_store_once(to, sender.stage_of(item), sender.segment_bytes(item), sender.policy);
  }
  float* weights = sender.shared->weights_at[target.rank];
  if (weights != nullptr && sender.segment_offset(item) == 0) {
    weights[target.row] = target.weight;
  }
}

// Loads run ahead of stores by all stages but one; the last stage is being read by its stores.
constexpr int kLookahead = kStagesPerWarp - 1;

template <class Rows>
__device__ inline void start_loads(const Sender& sender, Rows* rows) {
  for (int item = 0; item < kLookahead && item < sender.num_items; ++item) {
    load_item(sender, rows, item);
  }
}

// A block must not end while the copy engine still writes into its shared memory.
__device__ inline void drain_loads(const Sender& sender) {
  for (int item = 0; item < kLookahead && item < sender.num_items; ++item) {
    wait_for_load(sender, item);
  }
}

// Tells every receiver how far this warp is.
__device__ inline void publish(const Sender& sender, uint64_t progress) {
  const EpContext& context = sender.context;
  fence_proxy_async();
  __syncwarp();
  for (int rank = sender.lane; rank < context.shape.ep_size; rank += 32) {
    uint64_t* done =
        sender.peers.at<uint64_t>(rank, context.window.rows_done) +
        (context.ep_rank * context.shape.num_channels + sender.channel) * EP_SEND_WARPS +
        sender.warp;
    fence_sys();  // O1
    store_relaxed_sys(done, sender.shared->watch.epoch << kProgressBits | progress);
  }
}

// All rows of this warp are there.
__device__ inline void publish_rows(const Sender& sender) {
  bulk_wait_done<0>();
  publish(sender, kProgressAll);
}

// Now and then: the rows of all tokens before the one at `item` are there.
__device__ inline void publish_progress(const Sender& sender, int item) {
  const int tokens = item / sender.shape.segments;
  if (tokens % kProgressTokens == 0 && item % sender.shape.segments == 0 && tokens > 0) {
    bulk_wait_done<1>();
    publish(sender, static_cast<uint64_t>(tokens));
  }
}

// Before the stage of the item before the current one is loaded: all stores that read it must have
// done so. The engine reads a stage some time after the store was issued, the later the more stores
// are under way; that it has usually done so by now is no promise.
__device__ inline void free_stage(const Sender& sender) {
  if (!mutated(sender.context, Mutation::kDispatchReuseStage)) {
    bulk_wait_read<1>();  // O4
  }
  __syncwarp();
}

// For tests, the nearest that a reuse can come: the stage of `item` is written as soon as its
// stores are issued, at its end, which they read last; kDispatchScribble keeps O4 and waits before.
__device__ inline void reuse_at_once([[maybe_unused]] const Sender& sender,
                                     [[maybe_unused]] int item) {
#ifdef EP_TEST_MUTATIONS
  const bool waits = mutated(sender.context, Mutation::kDispatchScribble);
  if (!waits && !mutated(sender.context, Mutation::kDispatchReuseStage)) {
    return;
  }
  if (waits) {
    bulk_wait_read<0>();  // O4
  }
  __syncwarp();
  const int words = static_cast<int>(sender.segment_bytes(item) / 16);
  auto* last = reinterpret_cast<uint4*>(sender.stage_of(item)) + max_of(0, words - 32);
  if (sender.lane < words) {
    last[sender.lane] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async_shared();
  __syncwarp();
#endif
}

template <class Rows>
__device__ inline void send_rows(const Sender& sender, Rows* rows) {
  if (sender.num_items == 0) {
    return;
  }
  Target next = read_target(sender, rows, sender.first_token, sender.lane);
  Target now = next;
  for (int item = 0; item < sender.num_items; ++item) {
    const int64_t token = sender.token_of(item);
    if (item % sender.shape.segments == 0) {
      now = next;
      if (item + sender.shape.segments < sender.num_items) {
        next = read_target(sender, rows, token + sender.shape.warps, sender.lane);
      }
    }
    wait_for_load(sender, item);
    const bool lost = Rows::kMayWait && warp_is_aborted(sender.shared->watch);
    if (!lost) {
      store_copy(sender, item, now);
    }
    for (int slot = 32 + sender.lane; !lost && slot < sender.num_topk; slot += 32) {
      store_copy(sender, item, read_target(sender, rows, token, slot));
    }
    bulk_commit();
    reuse_at_once(sender, item);
    if (sender.shape.duplicators > 0) {
      publish_progress(sender, item);
    }
    if (item + kLookahead < sender.num_items) {
      free_stage(sender);
      load_item(sender, rows, item + kLookahead);
    }
  }
}

// Waits until the rows of this channel of every source have arrived.
__device__ inline void wait_for_rows(const Sender& sender) {
  const EpContext& context = sender.context;
  const uint64_t* done = sender.peers.at<uint64_t>(context.ep_rank, context.window.rows_done);
  const uint64_t expected = sender.shared->watch.epoch << kProgressBits | kProgressAll;
  const int words = context.shape.ep_size * sender.shape.warps;
  for (int word = threadIdx.x; word < words; word += 32 * sender.shape.warps) {
    const int source = word / sender.shape.warps;
    const int at = (source * context.shape.num_channels + sender.channel) * EP_SEND_WARPS +
                   word % sender.shape.warps;
    wait_until(context, &sender.shared->watch, done + at, expected,  // O2
               {source, EP_PHASE_DISPATCH_ROWS, sender.channel});
  }
}

// What a sending warp does before peers have entered.
template <class Rows>
__device__ inline void prepare(const Sender& sender, Rows* rows) {
  if (sender.lane < kStagesPerWarp) {
    mbarrier_init(sender.full + sender.lane, 1);
    fence_mbarrier_init();
  }
  zero_unused_rows(sender);
  if (!Rows::kMayWait) {
    start_loads(sender, rows);
  }
}

// The sending warps. Returns once the rows of this channel of every source are there.
template <class Rows>
__device__ inline void send(const EpDispatchArgs& args, const Sender& sender, Rows* rows,
                            bool entered) {
  if (!entered) {
    if (!Rows::kMayWait) {
      drain_loads(sender);
    }
    return;
  }
  if (Rows::kMayWait) {
    start_loads(sender, rows);
  }
  if (mutated(args.context, Mutation::kDispatchFlagFirst)) {
    publish_rows(sender);
    test_stall(args.context);
  }
  if (mutated(args.context, Mutation::kDispatchSkipTail) ||
      mutated(args.context, Mutation::kDuplicateSkipWait)) {
    test_stall(args.context);  // late after its entry, so that peers get that far
  }
  send_rows(sender, rows);
  if (Rows::kMayWait && warp_is_aborted(sender.shared->watch)) {
    bulk_wait_done<0>();
    return;
  }
  publish_rows(sender);
  if (!mutated(args.context, Mutation::kDispatchSkipTail)) {
    wait_for_rows(sender);
  }
}

// A block of the domain's part, between the start and the end of the launch.
template <class Rows>
__device__ inline void dispatch_channel(const EpDispatchArgs& args, Rows* rows, int channel,
                                        char* stages, DispatchShared* shared) {
  const Sender sender(args, channel, stages, shared);
  const int duplicator = sender.warp - sender.shape.warps;
  if (channel == 0) {
    announce(args.context, entry_of(args), shared->watch.epoch);  // O3
  }
  if (duplicator < 0) {
    prepare(sender, rows);
  }
  // Once for all warps: the barrier in it is the block's.
  const bool skip = mutated(args.context, Mutation::kDispatchSkipEntry);
  const bool entered = wait_for_entries(args.context, entry_of(args), channel, skip,  // O3
                                        &shared->watch, shared->rows_at, shared->weights_at);
  fence_proxy_async();  // O3
  if (duplicator < 0) {
    send(args, sender, rows, entered);
  } else if (entered) {
    Duplicator(args, channel, duplicator, stages, shared).run();
  }
}

}  // namespace ep
