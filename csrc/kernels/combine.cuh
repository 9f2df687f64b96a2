// combine, shared pieces: a block's view of the call, the ring of partial rows, the record order.
#pragma once

#include "core/window_layout.h"
#include "kernels/launch.cuh"
#include "kernels/numeric.cuh"

namespace ep {

constexpr int kHomeWarps = 8;

// What all warps of a block share, beside the stages.
struct CombineShared {
  Watch watch;
  const char* term[kHomeWarps][EP_MAX_TOPK];  // partial rows of each home warp's token, in order
};

// One block's view of the call.
struct CombineBlock {
  __device__ CombineBlock(const EpCombineArgs& combine_args, int block_channel,
                          CombineShared* block_shared)
      : args(combine_args),
        context(combine_args.context),
        peers(combine_args.context),
        shared(block_shared) {
    channel = block_channel;
    num_ranks = context.shape.ep_size;
    depth = context.shape.ring_depth;
    record_stride = context.shape.num_topk;
  }

  // A ring's slot for record `index`, of the ring between this channel of two ranks. `rank` is the
  // other end's rank for the memory's owner.
  __device__ int64_t slot(int rank, int index) const {
    return (int64_t{channel} * num_ranks + rank) * depth + index % depth;
  }
  // Seen from the expert rank that fills it ...
  __device__ char* slot_at_home(int home, int index) const {
    return peers.at<char>(home, context.window.partials) +
           slot(context.ep_rank, index) * context.window.slot_bytes;
  }
  __device__ uint64_t* full_at_home(int home, int index) const {
    return peers.at<uint64_t>(home, context.window.partial_full) + slot(context.ep_rank, index);
  }
  __device__ const uint64_t* free_here(int home, int index) const {
    return peers.at<uint64_t>(context.ep_rank, context.window.partial_free) + slot(home, index);
  }
  // ... and from the home rank that empties it.
  __device__ const char* slot_here(int expert_rank, int index) const {
    return peers.at<char>(context.ep_rank, context.window.partials) +
           slot(expert_rank, index) * context.window.slot_bytes;
  }
  __device__ const uint64_t* full_here(int expert_rank, int index) const {
    return peers.at<uint64_t>(context.ep_rank, context.window.partial_full) +
           slot(expert_rank, index);
  }
  __device__ uint64_t* free_at_expert(int expert_rank, int index) const {
    return peers.at<uint64_t>(expert_rank, context.window.partial_free) +
           slot(context.ep_rank, index);
  }
  // The value of a slot's words once record `index` of this launch is there, or has been read.
  __device__ uint64_t passed(int index) const {
    return shared->watch.epoch << kPartialBits | static_cast<uint64_t>(index + 1);
  }
  __device__ int64_t partial_bytes(int element_bytes) const {
    return args.hidden * (args.exact != 0 ? 4 : element_bytes);
  }

  const EpCombineArgs& args;
  const EpContext& context;
  Peers peers;
  CombineShared* shared;
  int channel, num_ranks, depth, record_stride;
};

// A received record: a token of `source` with rows here.
struct Record {
  int source;
  int record;       // in the plan's list
  int index;        // among the source's records
  bool opens_ring;  // its slot of the ring has not been used in this launch
};

// Walks through the records of a block's channel, in an order that is the same on all ranks: by
// chunk of the channel, then source, then token. Worker w of W takes every W-th. A whole warp calls.
class RecordCursor {
 public:
  __device__ RecordCursor(const CombineBlock& block, int worker, int num_workers)
      : block_(block), num_workers_(num_workers), at_(worker) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    for (int first = 0; first < block.num_ranks; first += 32) {
      const Share share = share_of(first + lane_);
      num_chunks_ = max(num_chunks_, __reduce_max_sync(~0u, share.end - share.first));
    }
    ahead_ = read_ranges(0, 0);
  }

  __device__ bool next(Record* record) {
    while (at_ >= end_) {
      if (!next_range()) {
        return false;
      }
    }
    const int list_first = __shfl_sync(~0u, now_.list_first, source_ % 32);
    const int share_first = __shfl_sync(~0u, now_.share_first, source_ % 32);
    *record = {source_, at_, at_ - list_first, at_ - share_first < block_.depth};
    at_ += num_workers_;
    return true;
  }

 private:
  struct Share {
    int first, end;  // chunks
  };
  // One lane's source: records [first, end) of the chunk, and where the list and the share start.
  struct Ranges {
    int first, end, list_first, share_first;
  };

  __device__ Share share_of(int source) const {
    if (source >= block_.num_ranks) {
      return {0, 0};
    }
    const int64_t chunks = ceil_div(block_.args.plan.source_tokens[source], kChunkTokens);
    const int channels = block_.context.shape.num_channels;
    return {static_cast<int>(chunks * block_.channel / channels),
            static_cast<int>(chunks * (block_.channel + 1) / channels)};
  }

  __device__ Ranges read_ranges(int chunk, int group) const {
    const int source = group + lane_;
    const Share share = share_of(source);
    if (share.first + chunk >= share.end) {
      return {0, 0, 0, 0};
    }
    const int32_t* first =
        block_.args.plan.chunk_first + source * chunk_stride(block_.context.shape);
    return {first[share.first + chunk], first[share.first + chunk + 1], first[0],
            first[share.first]};
  }

  // Steps to the next source, and to the next chunk after the last one; carries over how many
  // records are still to be passed until this worker's next.
  __device__ bool next_range() {
    const int behind = at_ - end_;
    ++source_;
    if (source_ == block_.num_ranks || source_ % 32 == 0) {
      if (source_ == block_.num_ranks) {
        source_ = 0;
        ++chunk_;
      }
      if (chunk_ >= num_chunks_) {
        return false;
      }
      now_ = ahead_;
      const bool last_group = source_ + 32 >= block_.num_ranks;
      ahead_ = read_ranges(chunk_ + (last_group ? 1 : 0), last_group ? 0 : source_ + 32);
    }
    end_ = __shfl_sync(~0u, now_.end, source_ % 32);
    at_ = __shfl_sync(~0u, now_.first, source_ % 32) + behind;
    return true;
  }

  const CombineBlock& block_;
  Ranges now_{}, ahead_{};
  int num_workers_, lane_ = 0, num_chunks_ = 0;
  int chunk_ = 0, source_ = -1;
  int at_, end_ = 0;
};

}  // namespace ep
