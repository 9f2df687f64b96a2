// Kernels of the rails, shared pieces: a rank's view of its rail, starts and ends of launches.
//
// Ordering    N1 to N4 are the net's promises (transport/net.cuh).
//             R1 record: stores into staging -> __syncwarp -> put -> signal of its chunk.
//             R2 signal (acquire) -> async-proxy fence -> bulk load of the record.
//             R3 a landing slot is written in epoch e after its owner was seen to enter that
//                epoch's dispatch, or its send: its earlier kernels, the readers, have ended.
//             R4 likewise a slot of `partials`, and the entry into the return of epoch e.
//             R5 a lane's staging slots are filled again once all puts that read them are sent:
//                puts of a channel finish in any order, and a counter tells how many, not which.
//                Sums are put from the landing area. All puts are sent when the kernel ends.
//             R6 routing has two buffers by parity of the epoch, as in route O3.
// Progress    Entries are signalled before anything is waited for. Putting warps wait for entries
//             and for their own puts only. Forwarding waits for records, final sums for returned
//             sums, and nobody who puts waits for them. So every wait ends once all ranks have
//             entered; inside a domain the arguments of dispatch and combine hold.
#pragma once

#include "kernels/launch.cuh"
#include "transport/net.cuh"
#include "transport/net_chaos.cuh"

namespace ep {

struct RailView {
  __device__ RailView(const EpContext& rank_context, const EpRail& rank_rail)
      : context(rank_context), rail(rank_rail), layout(rank_rail.layout), peers(rank_context) {}

  template <class T>
  __device__ T* local(int64_t offset) const {
    return peers.at<T>(context.ep_rank, offset);
  }
  __device__ int me() const { return rail.domain; }
  __device__ int64_t slot(int64_t area_offset, int area, int64_t token) const {
    return area_offset + (area * rail.max_tokens + token) * layout.slot_bytes;
  }
  __device__ int num_chunks() const {
    return static_cast<int>(ceil_div(rail.max_tokens, EP_RAIL_CHUNK_TOKENS));
  }
  // Chunks of a lane, and so its signals in one launch.
  __device__ int chunks_of_lane(int lane) const {
    return static_cast<int>(max_of(0, ceil_div(num_chunks() - lane, layout.lanes)));
  }
  // The value of a lane's signal once `chunk` of launch `epoch` is there.
  __device__ uint64_t arrived(uint64_t epoch, int chunk) const {
    const int lane = chunk % layout.lanes;
    return (epoch - 1) * static_cast<uint64_t>(chunks_of_lane(lane)) +
           static_cast<uint64_t>(chunk / layout.lanes + 1);
  }
  // A fault names ranks among all; a domain's own rank and peers are counted from first_rank.
  __device__ WaitingFor waiting_for(int domain, EpPhase phase, int channel) const {
    return {context.ep_rank + (domain - me()) * context.shape.ep_size, phase, channel};
  }
  // Domains that a token goes to, as bits. A whole warp calls. `dst_rank`: [K], among all ranks.
  __device__ uint32_t domains_of(const int32_t* dst_rank, int num_topk) const {
    uint32_t mask = 0;
    for (int slot = static_cast<int>(threadIdx.x) % 32; slot < num_topk; slot += 32) {
      const int rank = __ldg(dst_rank + slot);
      mask |= rank >= 0 ? 1u << (rank / context.shape.ep_size) : 0;
    }
    return __reduce_or_sync(~0u, mask);
  }

  const EpContext& context;
  const EpRail& rail;
  const EpRailLayout& layout;
  Peers peers;
};

// The task of one putting warp: a lane of channels to one domain. `lane` -1: none.
struct RailTask {
  int lane, domain, channel, number;
};

__device__ inline RailTask rail_task(const RailView& view, int rail_block) {
  const int others = view.rail.num_domains - 1;
  const int number = rail_block * EP_RAIL_WARPS + static_cast<int>(threadIdx.x) / 32;
  const int lane = number / others;
  const int other = number % others;
  const int domain = other < view.me() ? other : other + 1;
  const bool works = static_cast<int>(threadIdx.x) / 32 < EP_RAIL_WARPS && lane < view.layout.lanes;
  return {works ? lane : -1, domain, rail_channel(view.rail, works ? lane : 0, domain), number};
}

// A task's signals take the channel of its puts (N1). Of two domains a lane's channel to the own one
// carries nothing else, which is what the mutation needs.
__device__ inline int signal_channel(const RailView& view, const RailTask& task) {
  return mutated(view.context, Mutation::kRailOtherChannel)
             ? rail_channel(view.rail, task.lane, view.me())
             : task.channel;
}

// begin_launch for the rails' own kernels, which have epochs of their own.
__device__ inline bool begin_rail(const RailView& view, RailKernelId kernel, Watch* watch) {
  bool works = true;
  if (threadIdx.x == 0) {
    const auto* control = view.local<RailControl>(view.layout.control);
    watch->epoch = load_relaxed_sys(&control->epoch[kernel]) + 1;
    watch->context = &view.context;
    watch->deadline_ns = time_ns() + view.context.timeout_ns;
    watch->aborted = 0;
    test_stall(view.context);
    works = !must_leave(view.context, watch);
  }
  return __syncthreads_and(works ? 1 : 0) != 0;
}

// Adds a call to the history that the next plan compares between domains (rail_plan.cuh). On the
// device, so that replays of a graph count and its capture does not. One thread of a launch calls.
__device__ inline void note_call(const RailView& view, uint32_t operation, bool weighted) {
  constexpr uint32_t kMultiplier = 1664525;  // odd: calls in another order are another history
  auto* control = view.local<RailControl>(view.layout.control);
  control->history = (control->history + 2 * operation + (weighted ? 1 : 0) + 1) * kMultiplier;
}

// A fault that a block has met reaches all of this domain and the rail's ranks in the others; once a
// rank, so that these posts fill no queue. All threads call it.
template <class Net>
__device__ void tell_rails(const RailView& view, const Net& net, const Watch& watch) {
  __syncthreads();
  auto* control = view.local<RailControl>(view.layout.control);
  if (threadIdx.x == 0 && is_aborted(watch) && atomicExch(&control->told, 1u) == 0) {
    const EpContext& context = view.context;
    const uint64_t told = load_relaxed_sys(view.local<uint64_t>(context.window.error));
    for (int rank = 0; rank < context.shape.ep_size; ++rank) {
      store_relaxed_sys(view.peers.at<uint64_t>(rank, context.window.error), told);
    }
    for (int domain = 0; domain < view.rail.num_domains; ++domain) {
      if (domain != view.me()) {
        net.tell(domain, context.window.error);
      }
    }
  }
}

__device__ inline void end_rail(const RailView& view, RailKernelId kernel, const Watch& watch,
                                int num_blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* control = view.local<RailControl>(view.layout.control);
    const uint32_t last = static_cast<uint32_t>(num_blocks) - 1;
    if (atomicInc(&control->exits[kernel], last) == last) {
      store_relaxed_sys(&control->epoch[kernel], watch.epoch);
    }
  }
}

// Tells the rail that this rank has entered the call. One thread of one block calls.
template <class Net>
__device__ void signal_entry(const RailView& view, const Net& net, int number) {
  for (int domain = 0; domain < view.rail.num_domains; ++domain) {
    if (domain != view.me()) {
      net.signal(domain, number, rail_channel_entry(view.rail));
    }
  }
}

// R3, R4. A whole warp calls.
template <class Net>
__device__ bool wait_for_entry_of(const RailView& view, const Net& net, Watch* watch, int domain,
                                  int number) {
  bool here = true;
  if (threadIdx.x % 32 == 0) {
    here = wait_for_net(
        view.context, watch,
        [&] { return net.read_signal(domain, number, rail_channel_entry(view.rail)); },
        watch->epoch, view.waiting_for(domain, EP_PHASE_RAIL_ENTRY, -1));
  }
  return __shfl_sync(~0u, here ? 1 : 0, 0) != 0;
}

// Counts a channel's puts over launches, and bounds those on their way. A whole warp has one.
template <class Net>
class PutCounter {
 public:
  __device__ PutCounter(const RailView& view, const Net& net, Watch* watch, int channel)
      : view_(view), net_(net), watch_(watch), channel_(channel) {
    posted_ = load_relaxed_sys(view.local<uint64_t>(view.layout.posted) + channel);
  }

  __device__ void add() { ++posted_; }

  // Puts on their way; 0 where a put is over when it returns.
  __device__ uint64_t unsent() const {
    const uint64_t sent = net_.sent(channel_);
    return sent < posted_ ? posted_ - sent : 0;
  }

  // R5: at most `most` puts are still to be sent.
  __device__ bool wait_until_unsent(int most) const {
    bool here = true;
    if (threadIdx.x % 32 == 0 && posted_ > static_cast<uint64_t>(most)) {
      here = wait_for_net(
          view_.context, watch_, [&] { return net_.sent(channel_); },
          posted_ - static_cast<uint64_t>(most),
          view_.waiting_for(view_.me(), EP_PHASE_RAIL_SENT, channel_));
    }
    return __shfl_sync(~0u, here ? 1 : 0, 0) != 0;
  }

  // All puts are sent, and the number is kept for the next launch.
  __device__ void finish() const {
    wait_until_unsent(0);
    if (threadIdx.x % 32 == 0) {
      store_relaxed_sys(view_.local<uint64_t>(view_.layout.posted) + channel_, posted_);
    }
  }

 private:
  const RailView& view_;
  const Net& net_;
  Watch* watch_;
  int channel_;
  uint64_t posted_;
};

// Clocks of roles: test builds only, nothing otherwise. One block has one.
class RoleClock {
 public:
  __device__ RoleClock([[maybe_unused]] const RailView& view, [[maybe_unused]] RoleKernel kernel,
                       [[maybe_unused]] int block) {
#ifdef EP_TEST_MUTATIONS
    const int blocks = view.context.shape.num_channels + view.rail.num_blocks;
    words_ = block < blocks ? view.local<unsigned long long>(view.layout.role_times) +
                                  (kernel * blocks + block) * kRoleWords
                            : nullptr;
#endif
  }

  // All threads call it, before their work.
  __device__ void begin() const {
#ifdef EP_TEST_MUTATIONS
    if (threadIdx.x == 0 && words_ != nullptr) {
      words_[kRoleWaits] = words_[kRoleFills] = words_[kRolePuts] = 0;
      words_[kRoleMostUnsent] = 0;
      words_[kRoleCycles] = now();
      words_[kRoleBeginNs] = time_ns();
    }
    __syncthreads();
#endif
  }

  // One thread, once all others have done their work.
  __device__ void end() const {
#ifdef EP_TEST_MUTATIONS
    if (words_ != nullptr) {
      words_[kRoleEndNs] = time_ns();
      words_[kRoleCycles] = now() - words_[kRoleCycles];
    }
#endif
  }

  static __device__ uint64_t now() {
#ifdef EP_TEST_MUTATIONS
    return static_cast<uint64_t>(clock64());
#else
    return 0;
#endif
  }

  // What has passed since `start` was spent on `what`. All lanes call it, the first one counts.
  __device__ void add([[maybe_unused]] RoleWord what, [[maybe_unused]] uint64_t start) const {
#ifdef EP_TEST_MUTATIONS
    if (threadIdx.x % 32 == 0) {
      atomicAdd(words_ + what, static_cast<unsigned long long>(now() - start));
    }
#endif
  }

  // A record's wait for a place, its making and its put, after which `puts` has counted it. Called
  // and counted as `add`.
  template <class Puts>
  __device__ void add_record([[maybe_unused]] const Puts& puts, [[maybe_unused]] uint64_t waiting,
                             [[maybe_unused]] uint64_t filling,
                             [[maybe_unused]] uint64_t putting) const {
#ifdef EP_TEST_MUTATIONS
    if (threadIdx.x % 32 == 0) {
      atomicMax(words_ + kRoleMostUnsent, static_cast<unsigned long long>(puts.unsent()));
      atomicAdd(words_ + kRoleWaits, static_cast<unsigned long long>(filling - waiting));
      atomicAdd(words_ + kRoleFills, static_cast<unsigned long long>(putting - filling));
    }
    add(kRolePuts, putting);
#endif
  }

#ifdef EP_TEST_MUTATIONS
 private:
  unsigned long long* words_;
#endif
};

// Blocks of a launch that carry out what the others put.
template <class Net>
constexpr int kWorkerBlocks = Net::kNeedsWorker ? 1 : 0;

// Hands the arguments of all ranks to one launch.
template <class Args, int kRanks>
cudaError_t launch_world(void (*kernel)(World<Args, kRanks>), const Args* ranks, int num_ranks,
                         int blocks, LaunchShape shape, cudaStream_t stream) {
  World<Args, kRanks> world{};
  for (int rank = 0; rank < num_ranks; ++rank) {
    world.rank[rank] = ranks[rank];
  }
  const auto bytes = static_cast<int>(shape.shared_bytes);
  const cudaError_t set =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (set != cudaSuccess) {
    return set;
  }
  kernel<<<static_cast<unsigned>(num_ranks * blocks), static_cast<unsigned>(shape.threads),
           static_cast<size_t>(bytes), stream>>>(world);
  return cudaGetLastError();
}

// One launch for one rank, by `alone`, or for those of a whole world; `blocks` for each rank.
template <class Args>
cudaError_t launch_rail(void (*alone)(World<Args, 1>),
                        void (*together)(World<Args, EP_WORLD_RANKS>), const Args* ranks,
                        int num_ranks, int blocks, LaunchShape shape, cudaStream_t stream) {
  return num_ranks == 1 ? launch_world(alone, ranks, 1, blocks, shape, stream)
                        : launch_world(together, ranks, num_ranks, blocks, shape, stream);
}

}  // namespace ep
