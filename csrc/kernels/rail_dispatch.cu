// Instances of the rails' dispatch for nets on one GPU.
#include "core/rail_launch.h"
#include "kernels/rail_dispatch.cuh"

namespace ep {

cudaError_t launch_rail_dispatch(const EpRailDispatchArgs* ranks, int num_ranks,
                                 cudaStream_t stream) {
  return ranks[0].rail.net == EP_NET_CHAOS
             ? launch_rail_dispatch_on<ChaosNet>(ranks, num_ranks, stream)
             : launch_rail_dispatch_on<LoopNet>(ranks, num_ranks, stream);
}

}  // namespace ep
