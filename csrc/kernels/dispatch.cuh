// dispatch, shared pieces: how shared memory divides among the sending warps, and a block's view.
#pragma once

#include "kernels/launch.cuh"

namespace ep {

constexpr int kStageLimitBytes = 7168;  // longer rows travel in segments
constexpr int kStagesPerWarp = 4;
constexpr int kSharedBudgetBytes = 229376;  // of the 227 KiB that a block may have

// Warps that make further copies at the receiver, and stages of each.
constexpr int kDuplicateWarps = 4;
constexpr int kDuplicateStages = 2;
constexpr int kProgressTokens = 2;  // tokens of a warp between two words of progress

// How a row length is carried: chosen once per call, equal on all ranks.
struct SendShape {
  int warps;          // each sends its own tokens through its own ring of stages
  int duplicators;    // warps after them that make further copies; 0: the sender makes them
  int segments;       // of a row
  int segment_bytes;  // of all but the last
};

// Long rows need few issuing threads and much memory; short rows are limited by issue, so more
// warps share the same memory (measured: docs/performance.md).
EP_HOST_DEVICE constexpr SendShape send_shape(int64_t row_bytes, int32_t duplicate) {
  const int64_t segments = max_of(1, ceil_div(row_bytes, kStageLimitBytes));
  const int64_t segment = align_up(ceil_div(row_bytes, segments), 16);
  const int64_t duplicators = duplicate == EP_DUPLICATE_BY_RECEIVER ? kDuplicateWarps : 0;
  const int64_t left = kSharedBudgetBytes - duplicators * kDuplicateStages * segment;
  const int64_t warps = min_of(EP_SEND_WARPS, left / (kStagesPerWarp * segment));
  return {static_cast<int>(warps), static_cast<int>(duplicators), static_cast<int>(segments),
          static_cast<int>(segment)};
}

inline int64_t dispatch_shared_bytes(const SendShape& shape) {
  const int64_t stages =
      int64_t{shape.warps} * kStagesPerWarp + int64_t{shape.duplicators} * kDuplicateStages;
  return align_up(stages * shape.segment_bytes, 128);
}

// What all warps of a block share.
struct DispatchShared {
  Watch watch;
  char* rows_at[EP_MAX_RANKS];      // row 0 of each rank's recv_x
  float* weights_at[EP_MAX_RANKS];  // likewise recv_weights; null where no weights travel
  uint64_t full[EP_SEND_WARPS * kStagesPerWarp];
  uint64_t duplicate_full[kDuplicateWarps * kDuplicateStages];
};

// One warp's view of the call.
struct Sender {
  __device__ Sender(const EpDispatchArgs& dispatch_args, int block_channel, char* stages,
                    DispatchShared* block_shared)
      : args(dispatch_args),
        context(dispatch_args.context),
        peers(dispatch_args.context),
        shared(block_shared),
        shape(send_shape(dispatch_args.row_bytes, dispatch_args.duplicate)) {
    channel = block_channel;
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    num_topk = args.plan.num_topk;
    stage = stages + static_cast<int64_t>(warp) * kStagesPerWarp * shape.segment_bytes;
    full = shared->full + warp * kStagesPerWarp;
    const TokenRange range =
        channel_tokens(args.plan.num_tokens, channel, context.shape.num_channels);
    first_token = range.first + warp;
    const int64_t mine = max_of(0, ceil_div(range.end - first_token, shape.warps));
    num_items = static_cast<int>(mine) * shape.segments;
    policy = evict_first_policy();
  }

  __device__ int64_t token_of(int item) const {
    return first_token + int64_t{item / shape.segments} * shape.warps;
  }
  __device__ int64_t segment_offset(int item) const {
    return int64_t{item % shape.segments} * shape.segment_bytes;
  }
  __device__ uint32_t segment_bytes(int item) const {
    return static_cast<uint32_t>(
        min_of(shape.segment_bytes, args.row_bytes - segment_offset(item)));
  }
  __device__ char* stage_of(int item) const {
    return stage + item % kStagesPerWarp * shape.segment_bytes;
  }

  const EpDispatchArgs& args;
  const EpContext& context;
  Peers peers;
  DispatchShared* shared;
  SendShape shape;
  char* stage;
  uint64_t* full;
  uint64_t policy;
  int64_t first_token;
  int num_items, channel, warp, lane, num_topk;
};

}  // namespace ep
