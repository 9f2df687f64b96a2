// Instances of the rails' send role as a launch of its own, for nets on one GPU.
#include "core/rail_launch.h"
#include "kernels/rail_send.cuh"

namespace ep {

cudaError_t launch_rail_send(const EpRailSendArgs* ranks, int num_ranks, cudaStream_t stream) {
  return ranks[0].rail.net == EP_NET_CHAOS ? launch_rail_send_on<ChaosNet>(ranks, num_ranks, stream)
                                           : launch_rail_send_on<LoopNet>(ranks, num_ranks, stream);
}

}  // namespace ep
