// Launches of the rails' kernels; arguments were checked by csrc/api.
#pragma once

#include <cuda_runtime_api.h>

#include "api/ep_rail.h"

namespace ep {

cudaError_t launch_rail_exchange(const EpRailPlanArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_rail_counts(const EpRailPlanArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_rail_send(const EpRailSendArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_rail_dispatch(const EpRailDispatchArgs* ranks, int num_ranks,
                                 cudaStream_t stream);
cudaError_t launch_rail_return(const EpRailReturnArgs* ranks, int num_ranks, cudaStream_t stream);

// The same over GIN: linked in where NCCL is (csrc/transport/rail_gin.cu), null elsewhere.
__attribute__((weak)) cudaError_t launch_rail_exchange_gin(const EpRailPlanArgs* args,
                                                           cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_rail_counts_gin(const EpRailPlanArgs* args,
                                                         cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_rail_send_gin(const EpRailSendArgs* args,
                                                       cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_rail_dispatch_gin(const EpRailDispatchArgs* args,
                                                           cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_rail_return_gin(const EpRailReturnArgs* args,
                                                         cudaStream_t stream);

}  // namespace ep
