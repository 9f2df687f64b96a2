// dispatch at the receiver: a token's further rows are copied from its first one, while that is in
// the L2. Records come in about the order in which senders send.
#pragma once

#include "kernels/dispatch.cuh"
#include "kernels/records.cuh"

namespace ep {

// One warp; every kDuplicateWarps-th record of the channel.
class Duplicator {
 public:
  __device__ Duplicator(const EpDispatchArgs& args, int channel, int index, char* memory,
                        DispatchShared* shared)
      : args_(args),
        context_(args.context),
        shared_(shared),
        shape_(send_shape(args.row_bytes, args.duplicate)),
        channel_(channel),
        index_(index) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    const int before = shape_.warps * kStagesPerWarp + index * kDuplicateStages;
    stages_ = memory + before * shape_.segment_bytes;
    full_ = shared->duplicate_full + index * kDuplicateStages;
    rows_ = Peers(context_).at<char>(context_.ep_rank, args.recv_x_offset);
    policy_ = evict_first_policy();
    if (lane_ < kDuplicateStages) {
      mbarrier_init(full_ + lane_, 1);
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  __device__ void run() {
    const EpPlan& plan = args_.plan;
    const int stride = context_.shape.num_topk;
    RecordCursor cursor(context_, plan, channel_, index_, kDuplicateWarps);
    Record ahead{};
    RowList ahead_list{};
    bool more = cursor.next(&ahead);
    if (more) {
      ahead_list = read_rows(plan, stride, ahead);
    }
    while (more) {
      const int source = ahead.source;
      const RowList list = ahead_list;
      more = cursor.next(&ahead);
      if (more) {
        ahead_list = read_rows(plan, stride, ahead);
      }
      if (list.num_rows > 1 && !copy_record(source, list)) {
        break;
      }
    }
    bulk_wait_done<0>();
  }

 private:
  // As many segments at once as there are stages.
  __device__ bool copy_record(int source, const RowList& list) {
    if (!wait_for_row(source, list.token)) {
      return false;
    }
    for (int first = 0; first < shape_.segments; first += kDuplicateStages) {
      const int end = min(first + kDuplicateStages, shape_.segments);
      bulk_wait_read<0>();
      __syncwarp();
      for (int segment = first; segment < end; ++segment) {
        load(list.row(0), segment, segment - first);
      }
      for (int segment = first; segment < end; ++segment) {
        store(list, segment, segment - first);
      }
    }
    return true;
  }

  // Waits until the source's warp has sent this token.
  __device__ bool wait_for_row(int source, int token) {
    const TokenRange range =
        channel_tokens(args_.plan.source_tokens[source], channel_, context_.shape.num_channels);
    const auto ordinal = static_cast<int>(token - range.first);
    const uint64_t* done =
        Peers(context_).at<uint64_t>(context_.ep_rank, context_.window.rows_done) +
        (source * context_.shape.num_channels + channel_) * EP_SEND_WARPS + ordinal % shape_.warps;
    const auto sent = static_cast<uint64_t>(ordinal / shape_.warps + 1);
    bool here = true;
    if (lane_ == 0 && !mutated(context_, Mutation::kDuplicateSkipWait)) {
      here = wait_until(context_, &shared_->watch, done,  // O5
                        shared_->watch.epoch << kProgressBits | sent,
                        {source, EP_PHASE_DISPATCH_ROWS, channel_});
    }
    here = __all_sync(~0u, here);
    fence_proxy_async();
    return here;
  }

  __device__ uint32_t bytes_of(int segment) const {
    return static_cast<uint32_t>(
        min_of(shape_.segment_bytes, args_.row_bytes - int64_t{segment} * shape_.segment_bytes));
  }
  __device__ char* row_at(int row, int segment) const {
    return rows_ + row * args_.row_bytes + int64_t{segment} * shape_.segment_bytes;
  }

  __device__ void load(int row, int segment, int stage) {
    if (lane_ == 0) {
      mbarrier_expect(full_ + stage, bytes_of(segment));
      bulk_load(stages_ + stage * shape_.segment_bytes, row_at(row, segment), bytes_of(segment),
                full_ + stage, policy_);
    }
  }

  // Each lane stores one further row. A load depends on no other rank, so it needs no deadline.
  __device__ void store(const RowList& list, int segment, int stage) {
    while (!mbarrier_try(full_ + stage, (parity_ >> stage) & 1u)) {
    }
    parity_ ^= 1u << stage;
    for (int first = 1; first < list.num_rows; first += 32) {
      const int at = first + lane_;
      const int row = list.row(at % EP_MAX_TOPK);
      if (at < list.num_rows) {
        bulk_store_once(row_at(row, segment), stages_ + stage * shape_.segment_bytes,
                        bytes_of(segment), policy_);
      }
    }
    bulk_commit();
  }

  const EpDispatchArgs& args_;
  const EpContext& context_;
  DispatchShared* shared_;
  SendShape shape_;
  char* stages_;
  char* rows_;
  uint64_t* full_;
  uint64_t policy_;
  int channel_, index_, lane_;
  uint32_t parity_ = 0;  // of each stage's next load
};

}  // namespace ep
