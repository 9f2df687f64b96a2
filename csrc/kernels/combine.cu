// combine: give every token the sum of its rows on all ranks, in an order fixed by the plan.
//
// Data flow   expert rank: the token's local rows, ascending, --bulk loads--> stages; summed in fp32
//             --> outbox --bulk store--> one partial row in the landing ring of the token's home.
//             Home rank: partial rows, ranks ascending, summed in fp32 --> out[token]. Credits travel
//             back. A row's weight gradient travels behind its partial row.
// Grid        num_channels blocks; each has warps of both roles. Channel c owns the same share of
//             every rank's tokens in both roles, so rings are between equal channels. Expert role:
//             groups of a loading warp, four summing warps and a pushing warp; home role: warps that
//             take a token each.
// Invariants  I1 the order of every sum is the plan's: rows ascending, then ranks ascending.
//             I2 a ring holds `ring_depth` partial rows for each (channel, ordered pair of ranks);
//                record u of a source takes slot u mod depth.
// Progress    All ranks process a channel's records in one order: (chunk within the channel, source
//             rank, token). A home rank takes its tokens in ascending order, which agrees with it.
//             Take the least unfinished record. Everything before it is finished at every rank, so
//             its expert warp has nothing earlier to do; its slot's previous record is before it,
//             so the slot is free; all partial rows that its token waits for have equal or smaller
//             place. So it finishes: rings of any depth cannot deadlock.
// Ordering    O1 partial row: bulk store complete -> async-proxy fence; gradients: __syncwarp; both ->
//                release of partial_full.
//             O2 partial_full (acquire) -> __syncwarp -> reads of the partial row.
//             O3 reads of the partial row -> __syncwarp -> release of partial_free; acquire of it ->
//                async-proxy fence -> stores into the slot by the record one round later.
//             O4 combine_ready of a home rank (acquire) -> the first round of stores into its rings:
//                it has ended its earlier launches, so their slots are read. It also says whether
//                the home wants gradients, which its expert ranks must give then.
//             O5 sums -> async-proxy fence (shared memory) -> outbox_full -> bulk store of the outbox.
//             Within a block, stages and outboxes pass between warps by their full and empty
//             barriers. A pusher completes and releases all it has pushed before it waits for a peer.
// Failure     an expired wait files a fault; both roles leave, after the loads in flight.
#include "kernels/combine_expert.cuh"
#include "kernels/combine_home.cuh"

namespace ep {
namespace {

// Warps by role: summing warps first, so that a group's threads are aligned; groups of the expert
// role before that of the home role.
constexpr int kFirstLoader = kGroups * kSumWarps;
constexpr int kFirstPusher = kFirstLoader + kGroups;
constexpr int kStorer = kFirstPusher + kExpertGroups;
constexpr int kCrediter = kStorer + 1;
constexpr int kCombineThreads = 32 * (kCrediter + 1);

struct BlockShared {
  CombineShared common;
  GroupShared group[kGroups];
};

// Tells every peer that this rank's rings are empty, and whether it wants gradients.
__device__ void announce(const CombineBlock& block) {
  const EpContext& context = block.context;
  for (int rank = threadIdx.x; rank < block.num_ranks; rank += blockDim.x) {
    store_release_sys(
        block.peers.at<uint64_t>(rank, context.window.combine_ready) + context.ep_rank,
        entry_word(block.shared->watch.epoch, block.args.weights_grad != nullptr));  // O4
  }
}

template <EpDtype kDtype>
constexpr int kElementBytes = 16 / Elements<kDtype>::kPerVector;

// Sums rows of kDtype into partial rows of kPartial.
template <EpDtype kDtype, EpDtype kPartial>
__device__ void expert_role(const CombineBlock& block, GroupShared* shared, char* memory, int warp,
                            int index) {
  const int64_t hidden = block.args.hidden;
  const Group group(block, shared, memory,
                    sum_shape(hidden, kElementBytes<kDtype>, kElementBytes<kPartial>), index);
  if (warp < kFirstLoader) {
    sum_segments<kDtype, kPartial>(group, hidden * kElementBytes<kDtype>);
  } else if (warp < kFirstPusher) {
    load_rows(group, hidden * kElementBytes<kDtype>);
  } else {
    Pusher(group, hidden * kElementBytes<kPartial>).run();
  }
}

// Sums partial rows of kPartial into rows of kDtype.
template <EpDtype kDtype, EpDtype kPartial>
__device__ void home_role(const CombineBlock& block, GroupShared* shared, char* memory, int warp,
                          int index) {
  const int64_t hidden = block.args.hidden;
  const int64_t partial_bytes = hidden * kElementBytes<kPartial>;
  const Group group(block, shared, memory,
                    sum_shape(hidden, kElementBytes<kPartial>, kElementBytes<kDtype>), index);
  if (warp < kFirstLoader) {
    sum_segments<kPartial, kDtype>(group, partial_bytes);
  } else if (warp < kFirstPusher) {
    load_partials(group, partial_bytes, hidden * kElementBytes<kDtype>);
  } else if (warp == kStorer) {
    store_tokens(group, hidden * kElementBytes<kDtype>);
  } else {
    Crediter(group, align_up(partial_bytes, 16)).run();
  }
}

// Gives each warp its role.
template <EpDtype kDtype, bool kExact>
__device__ void combine_roles(const CombineBlock& block, BlockShared* shared, char* memory) {
  constexpr EpDtype kPartial = kExact ? EP_FLOAT32 : kDtype;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int index = kExpertGroups;
  if (warp < kFirstLoader) {
    index = warp / kSumWarps;
  } else if (warp < kStorer) {
    index = (warp - kFirstLoader) % kGroups;
  }
  if (index < kExpertGroups) {
    expert_role<kDtype, kPartial>(block, &shared->group[index], memory, warp, index);
  } else if (kExact && block.args.segment_tokens > 0) {
    home_role<kPartial, kPartial>(block, &shared->group[index], memory, warp, index);
  } else {
    home_role<kDtype, kPartial>(block, &shared->group[index], memory, warp, index);
  }
}

template <EpDtype kDtype, bool kExact>
__device__ void combine(const EpCombineArgs& args, int channel, BlockShared* shared, char* memory) {
  if (threadIdx.x < kGroups) {
    const bool home = threadIdx.x >= kExpertGroups;
    init_group(&shared->group[threadIdx.x], kSumWarps + (home ? 1 : 0));
  }
  if (begin_launch(args.context, kCombine, &shared->common.watch)) {
    const CombineBlock block(args, channel, &shared->common);
    if (channel == 0) {
      announce(block);
    }
    combine_roles<kDtype, kExact>(block, shared, memory);
  }
  end_launch(args.context, kCombine, shared->common.watch);
}

template <EpDtype kDtype, bool kExact, int kRanks>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ World<EpCombineArgs, kRanks> world) {
  extern __shared__ __align__(128) char memory[];
  __shared__ BlockShared shared;
  const int channels = world.rank[0].context.shape.num_channels;
  combine<kDtype, kExact>(world.rank[rank_of_block<kRanks>(channels)],
                          static_cast<int>(blockIdx.x) % channels, &shared, memory);
}

template <EpDtype kDtype, bool kExact>
cudaError_t launch(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream) {
  const LaunchShape shape = {kCombineThreads, kSumBudgetBytes};
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
