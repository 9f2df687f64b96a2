// dispatch: store every routed row into its final row of the receiver's recv_x.
//
// Data flow   x[token] --bulk load--> stage in shared memory --one bulk store per copy--> row
//             dst_row of recv_x at dst_rank; beside it one 4-byte store of the copy's weight.
//             With EP_DUPLICATE_BY_RECEIVER only a token's lowest row on a rank crosses the link; there
//             further warps copy it to its other rows, following the senders' progress.
//             Rows of recv_x that receive nothing (padding, static tail) are zeroed by their owner.
// Grid        num_channels blocks; channel c owns a contiguous share of the tokens; each warp of it
//             owns every W-th of them and a ring of stages of its own: warps never wait for each
//             other. Lanes are slots: each issues the store of one copy.
// Invariants  I1 (dst_rank, dst_row) is injective: one writer per row.
//             I2 dst_row < recv_rows at the receiver: by the plan's capacity rule.
//             I3 padding rows and the tail are nobody's dst_row: their owner may zero them at once.
// Ordering    O1 row stores -> bulk group complete -> async-proxy fence -> __syncwarp -> fence at
//                system scope -> rows_done.
//             O2 rows_done of all sources (acquire) -> kernel end -> reads of recv_x.
//             O3 dispatch_ready of a peer (acquire) -> __syncthreads -> async-proxy fence -> stores
//                into its rows: it says where this launch's rows start and that the peer's earlier
//                work on them is over.
//             O4 a stage is loaded again only after the stores that read it: bulk wait (read) by
//                every lane that issued one -> __syncwarp -> load.
//             O5 rows_done of a source's warp (acquire) -> async-proxy fence -> bulk load of a row that
//                it has sent.
// Failure     an expired wait files a fault; the block stores nothing more and leaves.
#include "kernels/dispatch_roles.cuh"

namespace ep {
namespace {

template <int kRanks>
__global__ void __launch_bounds__(32 * (EP_SEND_WARPS + kDuplicateWarps), 1)
    dispatch_kernel(const __grid_constant__ World<EpDispatchArgs, kRanks> world) {
  extern __shared__ __align__(128) char stages[];
  __shared__ DispatchShared shared;
  const int channels = world.rank[0].context.shape.num_channels;
  const EpDispatchArgs& args = world.rank[rank_of_block<kRanks>(channels)];
  OwnRows rows;
  if (begin_launch(args.context, kDispatch, &shared.watch)) {
    dispatch_channel(args, &rows, static_cast<int>(blockIdx.x) % channels, stages, &shared);
  }
  end_launch(args.context, kDispatch, shared.watch);
}

}  // namespace

cudaError_t launch_dispatch(const EpDispatchArgs* ranks, int num_ranks, cudaStream_t stream) {
  const SendShape shape = send_shape(ranks[0].row_bytes, ranks[0].duplicate);
  const LaunchShape launch = {32 * (shape.warps + shape.duplicators), dispatch_shared_bytes(shape)};
  return num_ranks == 1
             ? launch_with<EpDispatchArgs, 1>(dispatch_kernel<1>, ranks, 1, launch, stream)
             : launch_with<EpDispatchArgs, EP_WORLD_RANKS>(dispatch_kernel<EP_WORLD_RANKS>, ranks,
                                                           num_ranks, launch, stream);
}

}  // namespace ep
