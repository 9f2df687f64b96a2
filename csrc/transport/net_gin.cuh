// GinNet: puts and signals to the same-index ranks of other domains, over NCCL's GIN.
//
// Channels are mapped to contexts: data and its signal take the same context and the same peer, as
// GIN orders nothing else. Lanes towards one domain, D channels apart, go round all contexts.
// Ordering    N1 a signal is strong: once it is seen, all puts of its (channel, domain) that were
//                posted before it lie in place. Posted by one thread, or by several that
//                synchronised.
//             N2 a put is released at system scope, because rows may have come from a peer of the
//                own domain over NVLink; whoever acquired them posts the put.
//             N3 a signal is read with acquire at system scope; other threads of the block may read
//                the data after a barrier.
//             N4 a source may be written again once sent(channel) has reached the number of puts
//                that the channel posted.
// Signals and counters only grow, and nothing is reset: a CUDA graph can replay, in so far as NCCL's
// backend takes part without the host (GDAKI) or with a thread of it that runs anyway (proxy).
// Nothing here waits, but a post does while NCCL's queue of that context and peer is full, and for
// ever if the network stands still. So it never is: a channel's puts in flight are bounded by
// sent(), and the host asks for contexts enough, and for queues of GDAKI's that hold as many posts
// as the proxy's: twice the entries (ep_dispatcher/rail_posts.py).
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "api/ep_rail.h"
#include "core/gin_handle.h"
#include "transport/memory.cuh"

namespace ep {

class GinNet {
 public:
  static constexpr bool kNeedsWorker = false;

  __device__ explicit GinNet(const GinHandle& handle)
      : handle_(handle), comm_(*static_cast<const ncclDevComm*>(handle.device_comm)) {}

  __device__ GinNet(const EpContext& context, const EpRail& rail)
      : GinNet(GinHandle{rail.gin_device_comm, rail.gin_window, rail.gin_contexts, rail.num_domains,
                         rail.gin_signals_per_domain, rail.gin_counters}) {
    own_ = static_cast<const char*>(context.window_base[context.ep_rank]);
  }

  // The domain that this rank belongs to.
  __device__ int domain() const { return ncclTeamRail(comm_).rank; }

  // Copies from our window to that of the same-index rank of `domain`. A whole warp calls.
  __device__ void put(int domain, int64_t target_offset, int64_t source_offset, int64_t bytes,
                      int channel) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      gin_of(channel).put(ncclTeamRail(comm_), domain, window(), static_cast<size_t>(target_offset),
                          window(), static_cast<size_t>(source_offset), static_cast<size_t>(bytes),
                          ncclGin_None{}, ncclGin_WeakCounterInc{static_cast<uint32_t>(channel)},
                          ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
                          cuda::thread_scope_system);  // N2
    }
    __syncwarp();
  }

  // Adds 1 to signal `number` of that rank for us. One thread calls.
  __device__ void signal(int domain, int number, int channel) const {
    const ncclTeam rail = ncclTeamRail(comm_);
    gin_of(channel).signal(
        rail, domain, ncclGin_StrongSignalAdd{id_of(rail.rank, number), 1},  // N1
        ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
  }

  // Signals `number` that came from `domain`, which posted them over `channel`.
  __device__ uint64_t read_signal(int domain, int number, int channel) const {
    return gin_of(channel).readSignal(id_of(domain, number));  // N3
  }

  // Puts of this channel, to all domains, whose sources have been read.
  __device__ uint64_t sent(int channel) const {
    return gin_of(channel).readCounter(static_cast<uint32_t>(channel));  // N4
  }

  // Stores our word at `offset` to the same place there; ordered with nothing. One thread calls.
  __device__ void tell(int domain, int64_t offset) const {
    const uint64_t word = load_relaxed_sys(reinterpret_cast<const uint64_t*>(own_ + offset));
    gin_of(0).putValue(ncclTeamRail(comm_), domain, window(), static_cast<size_t>(offset), word);
  }

 private:
  __device__ ncclGin gin_of(int channel) const {
    return ncclGin(comm_, channel / handle_.num_domains % handle_.num_contexts);
  }

  __device__ ncclWindow_t window() const { return static_cast<ncclWindow_t>(handle_.window); }

  __device__ uint32_t id_of(int domain, int number) const {
    return static_cast<uint32_t>(domain * handle_.signals_per_domain + number);
  }

  GinHandle handle_;
  const ncclDevComm& comm_;
  const char* own_ = nullptr;  // our window; for tell()
};

}  // namespace ep
