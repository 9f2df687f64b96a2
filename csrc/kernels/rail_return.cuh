// combine over several domains, after ep_combine: a domain's sums go home and are added there.
//
// Data flow   return: landing slot of (home domain, token), the domain's sum and gradients --put-->
//                     slot of (own domain, token) in the home's `partials`; a signal for every
//                     EP_RAIL_CHUNK_TOKENS tokens.
//             final:  own sum and the other domains', domains ascending, in fp32 --> out[token].
// Grid        blocks [0, R) return, [R, R + C) final; with ChaosNet one more carries out its puts.
// Ordering, progress: rail.cuh.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/rail.cuh"

namespace ep {

constexpr int kReturnWarps = EP_RAIL_WARPS;
constexpr int kReturnThreads = 32 * kReturnWarps;
constexpr int kMostUnsentSums = 16;
constexpr int kVectorsAtOnce = 4;  // of a lane, that the final sum has in registers

__device__ inline int64_t sum_bytes(const EpCombineArgs& args) {
  const int element = args.dtype == EP_FLOAT32 || args.exact != 0 ? 4 : 2;
  return args.hidden * element;
}

// One putting warp: its lane's chunks of the tokens of its domain.
template <class Net>
__device__ void return_sums(const EpRailReturnArgs& args, const RailView& view, const Net& net,
                            const RailTask& task, const RoleClock& clock, Watch* watch) {
  const EpPlan& plan = args.domain.plan;
  const int64_t bytes =
      sum_bytes(args.domain) + (args.domain.weights_grad == nullptr ? 0 : 4 * plan.num_topk);
  const bool acts = threadIdx.x % 32 == 0;
  const bool first = mutated(view.context, Mutation::kReturnSignalFirst);
  const int signals = signal_channel(view, task);
  PutCounter<Net> puts(view, net, watch, task.channel);
  const uint64_t entering = RoleClock::now();
  if (!mutated(view.context, Mutation::kReturnSkipEntry) &&
      !wait_for_entry_of(view, net, watch, task.domain, rail_signal_return_entry(view.layout))) {
    return;
  }
  clock.add(kRoleWaits, entering);
  const int area = rail_area(view.me(), task.domain);
  const int area_there = rail_area(task.domain, view.me());
  for (int chunk = task.lane; chunk < view.num_chunks(); chunk += view.layout.lanes) {
    if (first && acts) {
      net.signal(task.domain, rail_signal_sums(view.layout, task.lane), signals);
      test_stall(view.context);
    }
    const int64_t start = int64_t{chunk} * EP_RAIL_CHUNK_TOKENS;
    const int64_t end = min_of(start + EP_RAIL_CHUNK_TOKENS, view.rail.max_tokens);
    for (int64_t token = start; token < end; ++token) {
      const int64_t at = (task.domain * view.rail.max_tokens + token) * plan.num_topk;
      bool wanted = false;
      for (int slot = static_cast<int>(threadIdx.x) % 32; slot < plan.num_topk; slot += 32) {
        wanted = wanted || __ldg(plan.dst_rank + at + slot) >= 0;
      }
      if (!__any_sync(~0u, wanted)) {
        continue;
      }
      const uint64_t waiting = RoleClock::now();
      if (!puts.wait_until_unsent(kMostUnsentSums - 1)) {
        return;
      }
      const uint64_t putting = RoleClock::now();
      net.put(task.domain, view.slot(view.layout.partials, area_there, token),
              view.slot(view.layout.landing, area, token), bytes, task.channel);
      puts.add();
      clock.add_record(puts, waiting, putting, putting);
    }
    if (!first && acts) {
      net.signal(task.domain, rail_signal_sums(view.layout, task.lane), signals);  // R1
    }
    __syncwarp();
  }
  puts.finish();  // R5
}

// One warp of the final role.
template <class Net, EpDtype kDtype, EpDtype kPartial>
class FinalSum {
 public:
  __device__ FinalSum(const EpRailReturnArgs& args, const RailView& view, const Net& net,
                      const RoleClock& clock, Watch* watch)
      : args_(args), view_(view), net_(net), clock_(clock), watch_(watch) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    bytes_ = sum_bytes(args.domain);
    const int element = kDtype == EP_FLOAT32 ? 4 : 2;
    out_bytes_ = args.domain.hidden * element;
  }

  __device__ void run(int worker, int num_workers) {
    const int num_topk = args_.domain.plan.num_topk;
    for (int64_t token = worker; token < args_.num_tokens; token += num_workers) {
      const int32_t* ranks = args_.dst_rank + token * num_topk;
      const uint32_t domains = view_.domains_of(ranks, num_topk);
      if (!arrive(domains, token)) {
        return;
      }
      if (domains == 0) {
        store_zero(token);
      } else {
        add(domains, token);
      }
      if (args_.domain.weights_grad != nullptr) {
        store_gradients(ranks, token);
      }
      __syncwarp();
    }
  }

 private:
  __device__ const char* term(int domain, int64_t token) const {
    if (domain == view_.me()) {
      const void* own = args_.domain.own_out != nullptr ? args_.domain.own_out : args_.domain.out;
      return static_cast<const char*>(own) + token * bytes_;
    }
    return view_.local<char>(
        view_.slot(view_.layout.partials, rail_area(view_.me(), domain), token));
  }
  __device__ char* out(int64_t token) const {
    return static_cast<char*>(args_.domain.out) + token * out_bytes_;
  }

  // Lane d waits for the chunk of domain d.
  __device__ bool arrive(uint32_t domains, int64_t token) {
    const auto chunk = static_cast<int>(token / EP_RAIL_CHUNK_TOKENS);
    const bool asks = lane_ != view_.me() && (domains >> lane_ & 1u) != 0 && chunk != known_ &&
                      !mutated(view_.context, Mutation::kReturnSkipWait);
    const uint64_t start = RoleClock::now();
    bool here = true;
    if (asks) {
      const int lane = chunk % view_.layout.lanes;
      here = wait_for_net(
          view_.context, watch_,
          [&] {
            return net_.read_signal(lane_, rail_signal_sums(view_.layout, lane),
                                    rail_channel(view_.rail, lane, view_.me()));
          },
          view_.arrived(watch_->epoch, chunk), view_.waiting_for(lane_, EP_PHASE_RAIL_SUMS, lane));
      known_ = here ? chunk : known_;
    }
    here = __all_sync(~0u, here);
    __syncwarp();
    clock_.add(kRoleWaits, start);
    return here;
  }

  __device__ void store_zero(int64_t token) const {
    auto* to = reinterpret_cast<uint4*>(out(token));
    for (int64_t at = lane_; at < out_bytes_ / 16; at += 32) {
      to[at] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ uint4 load_term(int domain, int64_t token, int64_t at) const {
    return __ldcg(reinterpret_cast<const uint4*>(term(domain, token)) + at);
  }

  // Several vectors of a lane at a time, so that their loads are on their way together.
  __device__ void add(uint32_t domains, int64_t token) const {
    const int64_t vectors = bytes_ / 16;
    int64_t at = lane_;
    for (; at + 32 * (kVectorsAtOnce - 1) < vectors; at += 32 * kVectorsAtOnce) {
      add_vectors<kVectorsAtOnce>(domains, token, at);
    }
#pragma unroll 1
    for (; at < vectors; at += 32) {
      add_vectors<1>(domains, token, at);
    }
  }

  // Vectors `first`, `first` + 32, ...
  template <int kVectors>
  __device__ void add_vectors(uint32_t domains, int64_t token, int64_t first) const {
    const bool alone = kDtype == kPartial && __popc(domains) == 1;
    uint4 held[kVectors];
    VectorSum<kPartial> sum[kVectors];
    for (uint32_t rest = domains; rest != 0; rest &= rest - 1) {
      const int domain = __ffs(static_cast<int>(rest)) - 1;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        held[i] = load_term(domain, token, first + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (rest == domains) {
          sum[i].start(held[i]);
        } else {
          sum[i].add(held[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (alone) {
        reinterpret_cast<uint4*>(out(token))[first + 32 * i] = held[i];
      } else {
        store_rounded<kPartial, kDtype>(out(token), static_cast<int>(first + 32 * i), sum[i].value);
      }
    }
  }

  // Gradients of slots elsewhere, and 0 for dropped ones; combine has stored the own domain's.
  __device__ void store_gradients(const int32_t* ranks, int64_t token) const {
    const int num_topk = args_.domain.plan.num_topk;
    for (int slot = lane_; slot < num_topk; slot += 32) {
      const int rank = __ldg(ranks + slot);
      const int domain = rank < 0 ? view_.me() : rank / view_.context.shape.ep_size;
      if (rank < 0) {
        args_.domain.weights_grad[token * num_topk + slot] = 0.0f;
      } else if (domain != view_.me()) {
        const auto* grads = reinterpret_cast<const float*>(term(domain, token) + bytes_);
        args_.domain.weights_grad[token * num_topk + slot] = load_float(grads + slot);
      }
    }
  }

  const EpRailReturnArgs& args_;
  const RailView& view_;
  const Net& net_;
  const RoleClock& clock_;
  Watch* watch_;
  int64_t bytes_, out_bytes_;
  int lane_;
  int known_ = -1;  // chunk of domain `lane_` that was last seen
};

template <class Net, EpDtype kDtype, bool kExact>
__device__ void rail_return_block(const EpRailReturnArgs& args, int block, Watch* watch) {
  const EpContext& context = args.domain.context;
  const RailView view(context, args.rail);
  const Net net(context, args.rail);
  const int putting = args.rail.num_blocks;
  const int adding = context.shape.num_channels;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const RoleClock clock(view, kRolesOfReturn, block);
  const int role = begin_rail(view, kRailReturn, watch) ? block : putting + adding;
  clock.begin();
  if (role < putting) {
    if (block == 0 && threadIdx.x == 0) {
      note_call(view, kRailReturn, args.domain.weights_grad != nullptr);
      signal_entry(view, net, rail_signal_return_entry(view.layout));
    }
    const RailTask task = rail_task(view, block);
    if (task.lane >= 0) {
      return_sums(args, view, net, task, clock, watch);
    }
  } else if (role < putting + adding) {
    if (mutated(context, Mutation::kReturnSkipEntry)) {
      test_stall(context);  // so that the next sums find these unread
    }
    constexpr EpDtype kPartial = kExact ? EP_FLOAT32 : kDtype;
    FinalSum<Net, kDtype, kPartial>(args, view, net, clock, watch)
        .run((block - putting) * kReturnWarps + warp, adding * kReturnWarps);
  }
  tell_rails(view, net, *watch);
  if (threadIdx.x == 0) {
    clock.end();
  }
  if constexpr (Net::kNeedsWorker) {
    if (block == putting + adding) {
      net.work(putting, *watch);
    } else if (block < putting && threadIdx.x == 0) {
      net.finish();
    }
  }
  end_rail(view, kRailReturn, *watch, putting + adding + kWorkerBlocks<Net>);
}

template <class Net, EpDtype kDtype, bool kExact, int kRanks>
__global__ void __launch_bounds__(kReturnThreads, 1)
    rail_return_kernel(const __grid_constant__ World<EpRailReturnArgs, kRanks> world) {
  __shared__ Watch watch;
  const EpRailReturnArgs& any = world.rank[0];
  const int blocks =
      any.domain.context.shape.num_channels + any.rail.num_blocks + kWorkerBlocks<Net>;
  rail_return_block<Net, kDtype, kExact>(world.rank[rank_of_block<kRanks>(blocks)],
                                         static_cast<int>(blockIdx.x) % blocks, &watch);
}

template <class Net, EpDtype kDtype, bool kExact>
cudaError_t launch_return(const EpRailReturnArgs* ranks, int num_ranks, cudaStream_t stream) {
  const EpRailReturnArgs& any = ranks[0];
  const int blocks =
      any.domain.context.shape.num_channels + any.rail.num_blocks + kWorkerBlocks<Net>;
  const LaunchShape shape = {kReturnThreads, 0};
  return launch_rail(rail_return_kernel<Net, kDtype, kExact, 1>,
                     rail_return_kernel<Net, kDtype, kExact, EP_WORLD_RANKS>, ranks, num_ranks,
                     blocks, shape, stream);
}

template <class Net>
cudaError_t launch_rail_return_on(const EpRailReturnArgs* ranks, int num_ranks,
                                  cudaStream_t stream) {
  const bool exact = ranks[0].domain.exact != 0;
  switch (ranks[0].domain.dtype) {
    case EP_BFLOAT16:
      return exact ? launch_return<Net, EP_BFLOAT16, true>(ranks, num_ranks, stream)
                   : launch_return<Net, EP_BFLOAT16, false>(ranks, num_ranks, stream);
    case EP_FLOAT16:
      return exact ? launch_return<Net, EP_FLOAT16, true>(ranks, num_ranks, stream)
                   : launch_return<Net, EP_FLOAT16, false>(ranks, num_ranks, stream);
    default:
      return launch_return<Net, EP_FLOAT32, false>(ranks, num_ranks, stream);
  }
}

}  // namespace ep
