// GinNet: puts and signals to the same-index ranks of other domains, over NCCL's GIN.
//
// Channels are mapped to contexts, channel % num_contexts: data and its signal take the same context
// and the same peer, as GIN orders nothing else.
// Ordering    N1 a signal is strong: once it is seen, all puts of its (channel, domain) that were
//                posted before it lie in place. Posted by one thread, or by several that
//                synchronised.
//             N2 a put is released at system scope, because rows may have come from a peer of the
//                own domain over NVLink; whoever acquired them posts the put.
//             N3 a signal is read with acquire at system scope; other threads of the block may read
//                the data after a barrier.
//             N4 a source may be written again once sent(channel) has reached the number of puts
//                that the channel posted.
// Signals and counters only grow, and nothing is reset: a CUDA graph can replay. Nothing here waits,
// but a post does while its queue is full: keep fewer puts in flight than kMaxUnsent.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "core/gin_handle.h"

namespace ep {

class GinNet {
 public:
  // Puts of one channel to one domain that may be posted and not sent; GIN's queues hold more.
  static constexpr int kMaxUnsent = 64;

  __device__ explicit GinNet(const GinHandle& handle)
      : handle_(handle), comm_(*static_cast<const ncclDevComm*>(handle.device_comm)) {}

  // The domain that this rank belongs to.
  __device__ int domain() const { return ncclTeamRail(comm_).rank; }

  // Copies from our window to that of the same-index rank of `domain`. One thread calls.
  __device__ void put(int domain, int64_t target_offset, int64_t source_offset, int64_t bytes,
                      int channel) const {
    const auto window = static_cast<ncclWindow_t>(handle_.window);
    gin_of(channel).put(ncclTeamRail(comm_), domain, window, static_cast<size_t>(target_offset),
                        window, static_cast<size_t>(source_offset), static_cast<size_t>(bytes),
                        ncclGin_None{}, ncclGin_WeakCounterInc{static_cast<uint32_t>(channel)},
                        ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
                        cuda::thread_scope_system);  // N2
  }

  // Adds 1 to signal `signal` of that rank for us. One thread calls.
  __device__ void signal(int domain, int signal, int channel) const {
    const ncclTeam rail = ncclTeamRail(comm_);
    const uint32_t number = number_of(rail.rank, signal);
    gin_of(channel).signal(rail, domain, ncclGin_StrongSignalAdd{number, 1},  // N1
                           ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
                           cuda::thread_scope_system);
  }

  // Signals number `signal` that came from `domain` over `channel`'s context, since the rails were
  // opened.
  __device__ uint64_t read_signal(int domain, int signal, int channel) const {
    return gin_of(channel).readSignal(number_of(domain, signal));  // N3
  }

  // Puts of this channel, to all domains, whose sources have been read, since the rails were opened.
  __device__ uint64_t sent(int channel) const {
    return gin_of(channel).readCounter(static_cast<uint32_t>(channel));  // N4
  }

 private:
  __device__ ncclGin gin_of(int channel) const {
    return ncclGin(comm_, channel % handle_.num_contexts);
  }

  __device__ uint32_t number_of(int domain, int signal) const {
    return static_cast<uint32_t>(domain * handle_.signals_per_domain + signal);
  }

  const GinHandle& handle_;
  const ncclDevComm& comm_;
};

}  // namespace ep
