// What every kernel does at its start and end, and the one way to launch it.
#pragma once

#include <cuda_runtime.h>

#include "core/launch.h"
#include "kernels/mutation.cuh"

namespace ep {

// Arguments of all ranks that one launch runs: one rank in use, up to EP_WORLD_RANKS in tests.
template <class Args, int kRanks>
struct World {
  Args rank[kRanks];
};

// This block's share of the work: rank and channel by block index.
template <int kRanks>
__device__ __forceinline__ int rank_of_block(int num_channels) {
  return kRanks == 1 ? 0 : static_cast<int>(blockIdx.x) / num_channels;
}

// Reads the epoch that this launch has and sets the deadline of its waits. False: the group has
// failed, and what earlier launches have left, a plan above all, may be unfinished; the block leaves.
// All threads of a block call it and get the same answer. Blocks may get different ones where the
// fault comes meanwhile: those that go on leave at their first wait, as the word stays.
__device__ inline bool begin_launch(const EpContext& context, KernelId kernel, Watch* watch) {
  bool works = true;
  if (threadIdx.x == 0) {
    const Peers peers(context);
    const LocalControl* local = peers.at<LocalControl>(context.ep_rank, context.window.local);
    watch->epoch = load_relaxed_sys(&local->epoch[kernel]) + 1;
    watch->context = &context;
    watch->deadline_ns = time_ns() + context.timeout_ns;
    watch->aborted = 0;
    test_stall(context);
    works = !must_leave(context, watch);
  }
  return __syncthreads_and(works ? 1 : 0) != 0;
}

// The last block to leave counts the launch. All threads call it, also after a fault.
// `more_blocks`: that the launch has beside its channels.
__device__ inline void end_launch(const EpContext& context, KernelId kernel, const Watch& watch,
                                  int more_blocks = 0) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const Peers peers(context);
    LocalControl* local = peers.at<LocalControl>(context.ep_rank, context.window.local);
    const auto last = static_cast<uint32_t>(context.shape.num_channels + more_blocks) - 1;
    if (atomicInc(&local->exits[kernel], last) == last) {
      store_relaxed_sys(&local->epoch[kernel], watch.epoch);
    }
  }
}

// Tokens of `channel`: whole chunks, contiguous, so that a source's records in it are as well.
__device__ __forceinline__ TokenRange channel_tokens(int64_t num_tokens, int channel,
                                                     int num_channels) {
  const int64_t chunks = ceil_div(num_tokens, kChunkTokens);
  return {min_of(num_tokens, chunks * channel / num_channels * kChunkTokens),
          min_of(num_tokens, chunks * (channel + 1) / num_channels * kChunkTokens)};
}

struct LaunchShape {
  int threads;
  int64_t shared_bytes;
};

template <class Args, int kRanks>
cudaError_t launch_with(void (*kernel)(World<Args, kRanks>), const Args* ranks, int num_ranks,
                        LaunchShape shape, cudaStream_t stream) {
  World<Args, kRanks> world{};
  for (int rank = 0; rank < num_ranks; ++rank) {
    world.rank[rank] = ranks[rank];
  }
  const auto bytes = static_cast<int>(shape.shared_bytes);
  const cudaError_t set =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (set != cudaSuccess) {
    return set;
  }
  const unsigned blocks = static_cast<unsigned>(num_ranks * ranks[0].context.shape.num_channels);
  kernel<<<blocks, static_cast<unsigned>(shape.threads), static_cast<size_t>(bytes), stream>>>(
      world);
  return cudaGetLastError();
}

}  // namespace ep
