// combine, shared pieces: a block's view of the call, the ring of partial rows, the record order.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/records.cuh"

namespace ep {

// What all warps of a block share.
struct CombineShared {
  Watch watch;
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
  // Whether a token's sum goes back to another domain, and where sum and gradients go. `grads_at`
  // is the place of gradients behind a sum that goes back.
  __device__ bool goes_back(int64_t token) const {
    return args.segment_tokens > 0 && token / args.segment_tokens != args.home_segment;
  }
  __device__ char* out_row(int64_t token, int64_t out_bytes) const {
    if (args.segment_tokens == 0) {
      return static_cast<char*>(args.out) + token * out_bytes;
    }
    const int64_t at = token % args.segment_tokens;
    if (!goes_back(token)) {
      return static_cast<char*>(args.own_out != nullptr ? args.own_out : args.out) + at * out_bytes;
    }
    const int64_t segment = token / args.segment_tokens;
    const int64_t area = segment < args.home_segment ? segment : segment - 1;
    return static_cast<char*>(args.segment_out) +
           (area * args.segment_tokens + at) * args.segment_stride;
  }
  __device__ float* weights_grad_row(int64_t token, int64_t grads_at) const {
    if (goes_back(token)) {
      return reinterpret_cast<float*>(out_row(token, 0) + grads_at);
    }
    const int64_t at = args.segment_tokens == 0 ? token : token % args.segment_tokens;
    return args.weights_grad + at * args.plan.num_topk;
  }

  const EpCombineArgs& args;
  const EpContext& context;
  Peers peers;
  CombineShared* shared;
  int channel, num_ranks, depth, record_stride;
};

}  // namespace ep
