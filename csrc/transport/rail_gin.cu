// Instances of the rails' kernels over GIN; linked in where NCCL is.
#include "core/rail_launch.h"
#include "kernels/rail_dispatch.cuh"
#include "kernels/rail_plan_launch.cuh"
#include "kernels/rail_return.cuh"
#include "kernels/rail_send.cuh"
#include "transport/net_gin.cuh"

namespace ep {

cudaError_t launch_rail_exchange_gin(const EpRailPlanArgs* args, cudaStream_t stream) {
  return launch_rail_exchange_on<GinNet>(args, 1, stream);
}

cudaError_t launch_rail_counts_gin(const EpRailPlanArgs* args, cudaStream_t stream) {
  return launch_rail_counts_on<GinNet>(args, 1, stream);
}

cudaError_t launch_rail_send_gin(const EpRailSendArgs* args, cudaStream_t stream) {
  return launch_rail_send_on<GinNet>(args, 1, stream);
}

cudaError_t launch_rail_dispatch_gin(const EpRailDispatchArgs* args, cudaStream_t stream) {
  return launch_rail_dispatch_on<GinNet>(args, 1, stream);
}

cudaError_t launch_rail_return_gin(const EpRailReturnArgs* args, cudaStream_t stream) {
  return launch_rail_return_on<GinNet>(args, 1, stream);
}

}  // namespace ep
