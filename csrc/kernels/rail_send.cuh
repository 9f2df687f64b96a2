// The send role of dispatch over several domains: as blocks of rail_dispatch, or as a launch before
// it, which needs no plan and so runs beside the plan's kernels.
//
// Data flow   x[token], its weights --> staging --put--> landing slot of (own domain, token) at the
//             same-index rank of each domain that the token goes to; a signal for every
//             EP_RAIL_CHUNK_TOKENS tokens.
// Grid        R blocks; with ChaosNet one more carries out the puts. A putting warp serves one
//             domain, and its lane's chunks there.
// Epoch       that of the dispatch whose records these are, counted by kRailSend: a launch of
//             rail_send counts it before its dispatch, a rail_dispatch with a send role itself.
// Ordering, progress: rail.cuh.
#pragma once

#include "kernels/rail.cuh"

namespace ep {

// Own tokens, and where they go: by the plan, or by the owners of their experts.
struct RecordSource {
  const char* x;
  const float* topk_weights;  // or null
  const int32_t* dst_rank;    // null: topk_idx decides
  const int64_t* topk_idx;
  int64_t num_tokens, row_bytes;
  int num_topk, num_experts;

  __device__ int64_t record_bytes() const {
    return row_bytes + (topk_weights == nullptr ? 0 : 4 * num_topk);
  }

  // Domains that a token goes to, as bits. A whole warp calls.
  __device__ uint32_t domains_of(const RailView& view, int64_t token) const {
    if (dst_rank != nullptr) {
      return view.domains_of(dst_rank + token * num_topk, num_topk);
    }
    uint32_t mask = 0;
    for (int slot = static_cast<int>(threadIdx.x) % 32; slot < num_topk; slot += 32) {
      const int64_t id = __ldg(topk_idx + token * num_topk + slot);
      if (id >= 0 && id < num_experts) {
        mask |= 1u << (__ldg(view.rail.expert_rank + id) / view.context.shape.ep_size);
      }
    }
    return __reduce_or_sync(~0u, mask);
  }
};

__device__ inline RecordSource records_of(const EpRailDispatchArgs& args) {
  const EpDispatchArgs& domain = args.domain;
  return {static_cast<const char*>(domain.x),
          domain.topk_weights,
          args.dst_rank,
          nullptr,
          args.num_tokens,
          domain.row_bytes,
          domain.plan.num_topk,
          domain.context.shape.num_experts};
}

__device__ inline RecordSource records_of(const EpRailSendArgs& args) {
  return {static_cast<const char*>(args.x),
          args.topk_weights,
          nullptr,
          args.topk_idx,
          args.num_tokens,
          args.row_bytes,
          args.num_topk,
          args.context.shape.num_experts};
}

// Assembles a token's record. A whole warp calls.
__device__ inline void fill_record(const RecordSource& from, char* record, int64_t token) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  copy_as_warp(record, from.x + token * from.row_bytes, from.row_bytes);
  auto* weights = reinterpret_cast<float*>(record + from.row_bytes);
  for (int slot = lane; from.topk_weights != nullptr && slot < from.num_topk; slot += 32) {
    weights[slot] = __ldg(from.topk_weights + token * from.num_topk + slot);
  }
  __syncwarp();  // R1
}

// One putting warp: its lane's chunks of own tokens that go to its domain.
template <class Net>
class RecordSender {
 public:
  __device__ RecordSender(const RecordSource& from, const RailView& view, const Net& net,
                          const RailTask& task, const RoleClock& clock, Watch* watch)
      : from_(from),
        view_(view),
        net_(net),
        task_(task),
        clock_(clock),
        watch_(watch),
        puts_(view, net, watch, task.channel) {
    staging_ = view.layout.staging + int64_t{task.number} * EP_RAIL_STAGES * view.layout.slot_bytes;
  }

  __device__ void run() {
    if (!wait_for_entry()) {
      return;
    }
    const bool first = mutated(view_.context, Mutation::kRailSignalFirst);
    for (int chunk = task_.lane; chunk < view_.num_chunks(); chunk += view_.layout.lanes) {
      if (first) {
        signal();
        test_stall(view_.context);
      }
      if (!send_chunk(chunk)) {
        return;
      }
      if (!first) {
        signal();  // R1
      }
    }
    puts_.finish();
  }

 private:
  __device__ static bool acts() { return threadIdx.x % 32 == 0; }

  __device__ bool wait_for_entry() const {
    const uint64_t start = RoleClock::now();
    const bool here = mutated(view_.context, Mutation::kRailSkipEntry) ||
                      wait_for_entry_of(view_, net_, watch_, task_.domain,
                                        rail_signal_dispatch_entry(view_.layout));  // R3
    clock_.add(kRoleWaits, start);
    return here;
  }

  __device__ void signal() const {
    if (acts()) {
      net_.signal(task_.domain, rail_signal_rows(task_.lane), signal_channel(view_, task_));
    }
    __syncwarp();
  }

  __device__ bool send_chunk(int chunk) {
    const int64_t start = int64_t{chunk} * EP_RAIL_CHUNK_TOKENS;
    const int64_t end = min_of(start + EP_RAIL_CHUNK_TOKENS, from_.num_tokens);
    for (int64_t token = start; token < end; ++token) {
      const bool wanted = (from_.domains_of(view_, token) >> task_.domain & 1u) != 0;
      if (wanted && !send_token(token)) {
        return false;
      }
    }
    return true;
  }

  __device__ bool send_token(int64_t token) {
    const int64_t source = staging_ + stage_ * view_.layout.slot_bytes;
    const uint64_t waiting = RoleClock::now();
    if (stage_ == 0 && !mutated(view_.context, Mutation::kRailReuseStage) &&
        !puts_.wait_until_unsent(0)) {  // R5
      return false;
    }
    const bool early = mutated(view_.context, Mutation::kRailPutFirst);
    if (early) {
      put(token, source);
      test_stall(view_.context);
    }
    const uint64_t filling = RoleClock::now();
    fill_record(from_, view_.local<char>(source), token);
    const uint64_t putting = RoleClock::now();
    if (!early) {
      put(token, source);
    }
    clock_.add_record(puts_, waiting, filling, putting);
    stage_ = (stage_ + 1) % EP_RAIL_STAGES;
    return true;
  }

  __device__ void put(int64_t token, int64_t source) {
    const int area = rail_area(task_.domain, view_.me());
    net_.put(task_.domain, view_.slot(view_.layout.landing, area, token), source,
             from_.record_bytes(), task_.channel);
    puts_.add();
  }

  const RecordSource& from_;
  const RailView& view_;
  const Net& net_;
  const RailTask& task_;
  const RoleClock& clock_;
  Watch* watch_;
  PutCounter<Net> puts_;
  int64_t staging_;
  int stage_ = 0;
};

// A block of the send role. `in_turn`: no earlier call has left records without their dispatch, nor
// was this call's sent before. All threads call it.
template <class Net>
__device__ void send_block(const RecordSource& from, const RailView& view, const Net& net,
                           int rail_block, bool in_turn, const RoleClock& clock, Watch* watch) {
  if (rail_block == 0 && threadIdx.x == 0) {
    if (in_turn) {
      signal_entry(view, net, rail_signal_dispatch_entry(view.layout));
    } else {
      const WaitingFor own = view.waiting_for(view.me(), EP_PHASE_RAIL_SENT, -1);
      file_fault(view.context, own, watch->epoch, 0);
      set_aborted(watch);
    }
  }
  const RailTask task = rail_task(view, rail_block);
  if (in_turn && task.lane >= 0) {
    RecordSender<Net>(from, view, net, task, clock, watch).run();
  }
}

template <class Net>
__device__ void rail_send_block(const EpRailSendArgs& args, int block, Watch* watch) {
  const RailView view(args.context, args.rail);
  const Net net(args.context, args.rail);
  const int putting = args.rail.num_blocks;
  const RoleClock clock(view, kRolesOfDispatch, args.context.shape.num_channels + block);
  const bool works = begin_rail(view, kRailSend, watch);
  clock.begin();
  if (works && block < putting) {
    const RecordSource from = records_of(args);
    const auto* local = view.local<LocalControl>(args.context.window.local);
    const bool in_turn = load_relaxed_sys(&local->epoch[kDispatch]) + 1 >= watch->epoch;
    send_block(from, view, net, block, in_turn, clock, watch);
  }
  tell_rails(view, net, *watch);
  if (threadIdx.x == 0) {
    clock.end();
  }
  if constexpr (Net::kNeedsWorker) {
    if (block == putting) {
      net.work(putting, *watch);
    } else if (threadIdx.x == 0) {
      net.finish();
    }
  }
  end_rail(view, kRailSend, *watch, putting + kWorkerBlocks<Net>);
}

constexpr int kSendThreads = 32 * EP_RAIL_WARPS;

template <class Net, int kRanks>
__global__ void __launch_bounds__(kSendThreads, 1)
    rail_send_kernel(const __grid_constant__ World<EpRailSendArgs, kRanks> world) {
  __shared__ Watch watch;
  const int blocks = world.rank[0].rail.num_blocks + kWorkerBlocks<Net>;
  rail_send_block<Net>(world.rank[rank_of_block<kRanks>(blocks)],
                       static_cast<int>(blockIdx.x) % blocks, &watch);
}

template <class Net>
cudaError_t launch_rail_send_on(const EpRailSendArgs* ranks, int num_ranks, cudaStream_t stream) {
  const int blocks = ranks[0].rail.num_blocks + kWorkerBlocks<Net>;
  const LaunchShape shape = {kSendThreads, 0};
  return launch_rail(rail_send_kernel<Net, 1>, rail_send_kernel<Net, EP_WORLD_RANKS>, ranks,
                     num_ranks, blocks, shape, stream);
}

}  // namespace ep
