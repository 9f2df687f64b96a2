// Instances of the rails' return of sums for nets on one GPU.
#include "core/rail_launch.h"
#include "kernels/rail_return.cuh"

namespace ep {

cudaError_t launch_rail_return(const EpRailReturnArgs* ranks, int num_ranks, cudaStream_t stream) {
  return ranks[0].rail.net == EP_NET_CHAOS
             ? launch_rail_return_on<ChaosNet>(ranks, num_ranks, stream)
             : launch_rail_return_on<LoopNet>(ranks, num_ranks, stream);
}

}  // namespace ep
