// dispatch over several domains: rows reach a domain once, and are stored from there.
//
// Data flow   send:    rail_send.cuh; left out where a launch of its own has sent already.
//             forward: the dispatch of dispatch.cu over virtual tokens, whose rows lie in x or in
//                      landing slots, after the signal of their chunk.
// Grid        blocks [0, C) forward, [C, C + R) send; with ChaosNet one more carries out its puts.
// Ordering, progress: rail.cuh.
#pragma once

#include "kernels/dispatch_roles.cuh"
#include "kernels/rail_send.cuh"

namespace ep {

// Rows of virtual tokens. One warp has one.
template <class Net>
class RailRows {
 public:
  static constexpr bool kMayWait = true;

  __device__ RailRows(const EpRailDispatchArgs& args, const RailView& view, const Net& net,
                      const RoleClock& clock, Watch* watch)
      : args_(args), view_(view), net_(net), clock_(clock), watch_(watch) {}

  // Lane 0 gets the row once it is there; nullptr where the token goes to no rank of this domain,
  // or the block has to leave.
  __device__ const char* row(const Sender& sender, int64_t token) {
    const int32_t* ranks = args_.domain.plan.dst_rank + token * sender.num_topk;
    bool wanted = false;
    for (int slot = sender.lane; slot < sender.num_topk; slot += 32) {
      wanted = wanted || __ldg(ranks + slot) >= 0;
    }
    if (!__any_sync(~0u, wanted) || sender.lane != 0) {
      return nullptr;
    }
    const auto segment = static_cast<int>(token / view_.rail.max_tokens);
    const int64_t at = token % view_.rail.max_tokens;
    if (segment == view_.me()) {
      return static_cast<const char*>(args_.domain.x) + at * args_.domain.row_bytes;
    }
    if (!arrive(segment, at)) {
      return nullptr;
    }
    fence_proxy_async();  // R2
    return record(segment, at);
  }

  __device__ float weight(const Sender& sender, int64_t token, int slot) {
    const auto segment = static_cast<int>(token / view_.rail.max_tokens);
    const int64_t at = token % view_.rail.max_tokens;
    if (args_.domain.recv_weights_offset < 0) {
      return 0.0f;
    }
    if (segment == view_.me()) {
      return __ldg(args_.domain.topk_weights + at * sender.num_topk + slot);
    }
    if (!arrive(segment, at)) {
      return 0.0f;
    }
    return load_float(reinterpret_cast<const float*>(record(segment, at) + args_.domain.row_bytes) +
                      slot);
  }

 private:
  __device__ const char* record(int segment, int64_t at) const {
    return view_.local<char>(view_.slot(view_.layout.landing, rail_area(view_.me(), segment), at));
  }

  // R2: the token's chunk is there. Each lane asks for itself.
  __device__ bool arrive(int segment, int64_t at) {
    const auto chunk = static_cast<int>(at / EP_RAIL_CHUNK_TOKENS);
    const int known = segment * view_.num_chunks() + chunk;
    if (known == known_ || mutated(view_.context, Mutation::kRailSkipWait)) {
      return true;
    }
    const int lane = chunk % view_.layout.lanes;
    const uint64_t start = RoleClock::now();
    const bool here = wait_for_net(
        view_.context, watch_,
        [&] {
          return net_.read_signal(segment, rail_signal_rows(lane),
                                  rail_channel(view_.rail, lane, view_.me()));
        },
        view_.arrived(watch_->epoch, chunk), view_.waiting_for(segment, EP_PHASE_RAIL_ROWS, lane));
    clock_.add(kRoleWaits, start);
    known_ = here ? known : known_;
    return here;
  }

  const EpRailDispatchArgs& args_;
  const RailView& view_;
  const Net& net_;
  const RoleClock& clock_;
  Watch* watch_;
  int known_ = -1;  // chunk that was last seen to be there, counted over segments
};

// Blocks of a launch beside the forwarding ones: they put, and carry out what others put.
template <class Net>
EP_HOST_DEVICE constexpr int rail_blocks_of(const EpRailDispatchArgs& args) {
  return args.sent != 0 ? 0 : args.rail.num_blocks + kWorkerBlocks<Net>;
}

// What one block does of a call that is not to leave: it forwards or it puts.
template <class Net>
__device__ void run_role(const EpRailDispatchArgs& args, const RailView& view, const Net& net,
                         const RoleClock& clock, int block, char* stages, DispatchShared* shared) {
  const EpContext& context = args.domain.context;
  const int channels = context.shape.num_channels;
  Watch* watch = &shared->watch;
  if (block == 0 && threadIdx.x == 0) {
    note_call(view, kRailSend, args.domain.recv_weights_offset >= 0);
  }
  if (block < channels) {
    if (mutated(context, Mutation::kRailSkipEntry)) {
      test_stall(context);  // so that the next records find these unread
    }
    RailRows<Net> rows(args, view, net, clock, watch);
    dispatch_channel(args.domain, &rows, block, stages, shared);
  } else if (block < channels + args.rail.num_blocks) {
    const RecordSource from = records_of(args);
    const auto* control = view.local<RailControl>(view.layout.control);
    const bool in_turn = load_relaxed_sys(&control->epoch[kRailSend]) + 1 == watch->epoch;
    send_block(from, view, net, block - channels, in_turn, clock, watch);
  }
}

template <class Net>
__device__ void rail_dispatch_block(const EpRailDispatchArgs& args, int block, char* stages,
                                    DispatchShared* shared) {
  const EpContext& context = args.domain.context;
  const RailView view(context, args.rail);
  const Net net(context, args.rail);
  const int channels = context.shape.num_channels;
  const int putting = args.rail.num_blocks;
  Watch* watch = &shared->watch;
  const RoleClock clock(view, kRolesOfDispatch, block);
  const bool works = begin_launch(context, kDispatch, watch);
  clock.begin();
  if (works) {
    run_role(args, view, net, clock, block, stages, shared);
  }
  tell_rails(view, net, *watch);
  if (threadIdx.x == 0) {
    clock.end();
  }
  if (block >= channels && block < channels + putting) {
    end_rail(view, kRailSend, *watch, putting);
  }
  if constexpr (Net::kNeedsWorker) {
    if (block == channels + putting) {
      net.work(putting, *watch);
    } else if (block >= channels && threadIdx.x == 0) {
      net.finish();
    }
  }
  end_launch(context, kDispatch, *watch, rail_blocks_of<Net>(args));
}

template <class Net, int kRanks>
__global__ void __launch_bounds__(32 * (EP_SEND_WARPS + kDuplicateWarps), 1)
    rail_dispatch_kernel(const __grid_constant__ World<EpRailDispatchArgs, kRanks> world) {
  extern __shared__ __align__(128) char stages[];
  __shared__ DispatchShared shared;
  const EpRailDispatchArgs& any = world.rank[0];
  const int blocks = any.domain.context.shape.num_channels + rail_blocks_of<Net>(any);
  rail_dispatch_block<Net>(world.rank[rank_of_block<kRanks>(blocks)],
                           static_cast<int>(blockIdx.x) % blocks, stages, &shared);
}

template <class Net>
cudaError_t launch_rail_dispatch_on(const EpRailDispatchArgs* ranks, int num_ranks,
                                    cudaStream_t stream) {
  const EpRailDispatchArgs& any = ranks[0];
  const SendShape shape = send_shape(any.domain.row_bytes, any.domain.duplicate);
  const LaunchShape launch = {32 * (shape.warps + shape.duplicators), dispatch_shared_bytes(shape)};
  const int blocks = any.domain.context.shape.num_channels + rail_blocks_of<Net>(any);
  return launch_rail(rail_dispatch_kernel<Net, 1>, rail_dispatch_kernel<Net, EP_WORLD_RANKS>, ranks,
                     num_ranks, blocks, launch, stream);
}

}  // namespace ep
