// combine: give every token the sum of its rows on all ranks, in an order fixed by the plan.
//
// Data flow   expert rank: the token's local rows, ascending, summed in fp32 --> one partial row in
//             the landing ring of the token's home --> home rank: partial rows, ranks ascending,
//             summed in fp32 --> out[token]. Credits travel back. A row's weight gradient travels
//             behind its partial row.
// Grid        num_channels blocks; each has warps of both roles. Channel c owns the same share of
//             every rank's tokens in both roles, so rings are between equal channels.
// Invariants  I1 the order of every sum is the plan's: rows ascending, then ranks ascending.
//             I2 a ring holds `ring_depth` partial rows for each (channel, ordered pair of ranks);
//                record u of a source takes slot u mod depth.
// Progress    All ranks process a channel's records in one order: (chunk within the channel, source
//             rank, token). A home rank takes its tokens in ascending order, which agrees with it.
//             Take the least unfinished record. Everything before it is finished at every rank, so
//             its expert warp has nothing earlier to do; its slot's previous record is before it,
//             so the slot is free; all partial rows that its token waits for have equal or smaller
//             place. So it finishes: rings of any depth cannot deadlock.
// Ordering    O1 partial row and gradients -> __syncwarp -> release of partial_full.
//             O2 partial_full (acquire) -> __syncwarp -> reads of the partial row.
//             O3 reads of the partial row -> __syncwarp -> release of partial_free; acquire of it ->
//                stores into the slot by the record one round later.
//             O4 combine_ready of a home rank (acquire) -> the first round of stores into its rings:
//                it has ended its earlier launches, so their slots are read.
// Failure     an expired wait files a fault; both roles leave.
#include "kernels/combine_expert.cuh"

namespace ep {
namespace {

constexpr int kCombineThreads = 32 * (kExpertWarps + kHomeWarps);

// Tells every peer that this rank's rings are empty.
__device__ void announce(const CombineBlock& block) {
  const EpContext& context = block.context;
  for (int rank = threadIdx.x; rank < block.num_ranks; rank += blockDim.x) {
    store_release_sys(
        block.peers.at<uint64_t>(rank, context.window.combine_ready) + context.ep_rank,
        block.shared->watch.epoch);  // O4
  }
}

template <EpDtype kDtype, bool kExact>
__device__ void combine(const EpCombineArgs& args, int channel, CombineShared* shared) {
  begin_launch(args.context, kCombine, &shared->watch);
  const CombineBlock block(args, channel, shared);
  if (channel == 0) {
    announce(block);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kExpertWarps) {
    push_partials<kDtype, kExact>(block, warp);
  } else {
    bring_home<kDtype, kExact>(block, warp - kExpertWarps);
  }
  end_launch(args.context, kCombine, shared->watch);
}

template <EpDtype kDtype, bool kExact, int kRanks>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ World<EpCombineArgs, kRanks> world) {
  __shared__ CombineShared shared;
  const int channels = world.rank[0].context.shape.num_channels;
  combine<kDtype, kExact>(world.rank[rank_of_block<kRanks>(channels)],
                          static_cast<int>(blockIdx.x) % channels, &shared);
}

template <EpDtype kDtype, bool kExact>
cudaError_t launch(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream) {
  const LaunchShape shape = {kCombineThreads, 0};
  return num_ranks == 1
             ? launch_with<EpCombineArgs, 1>(combine_kernel<kDtype, kExact, 1>, ranks, 1, shape,
                                             stream)
             : launch_with<EpCombineArgs, EP_WORLD_RANKS>(
                   combine_kernel<kDtype, kExact, EP_WORLD_RANKS>, ranks, num_ranks, shape, stream);
}

}  // namespace

cudaError_t launch_combine(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream) {
  const bool exact = ranks[0].exact != 0;
  switch (ranks[0].dtype) {
    case EP_BFLOAT16:
      return exact ? launch<EP_BFLOAT16, true>(ranks, num_ranks, stream)
                   : launch<EP_BFLOAT16, false>(ranks, num_ranks, stream);
    case EP_FLOAT16:
      return exact ? launch<EP_FLOAT16, true>(ranks, num_ranks, stream)
                   : launch<EP_FLOAT16, false>(ranks, num_ranks, stream);
    default:
      return launch<EP_FLOAT32, false>(ranks, num_ranks, stream);
  }
}

}  // namespace ep
