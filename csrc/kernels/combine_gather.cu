// combine by gathering: the home rank reads its tokens' expert rows where they lie.
//
// Data flow   peers' expert rows --bulk loads--> stages of a warp; each rank's rows summed in fp32,
//             ascending, rounded unless exact; ranks added, ascending --> out[token], once. A row's
//             weight gradient is read beside it. Each row crosses the link, where the other form
//             (combine.cu) sends one sum for each pair of token and rank; but nothing passes
//             through memory a second time, and blocks do not wait for each other in between.
// Grid        num_channels blocks; channel c owns a contiguous share of this rank's tokens; each
//             warp of it owns every W-th of them and a ring of stages: warps never wait for each
//             other.
// Invariants  I1 the order of every sum is the plan's: ranks ascending, rows ascending in each.
//             I2 the rows of a token are injective (dispatch I1), so the order is total.
// Ordering    G1 all earlier work of the rank's stream, its expert rows among it -> release of
//                gather_ready; acquire of it -> __syncthreads -> async-proxy fence -> loads of the
//                rows. It says where the rows lie in this launch.
//             G2 all loads of a block complete (their barriers, waited for by all warps) ->
//                __syncthreads -> release of gather_done at the rows' owner.
//             G3 gather_done of all readers (acquire) -> end of the owner's kernel -> later work
//                of its stream may overwrite the rows, and the next launch the words of G1.
//             G4 all lanes have read a stage -> __syncwarp -> the next load into it.
// Failure     an expired wait files a fault; the block leaves, without loads in flight.
#include "kernels/combine_gather.cuh"
#include "kernels/ready.cuh"

namespace ep {
namespace {

__device__ Entry entry_of(const EpCombineArgs& args) {
  return {args.context.window.gather_ready, args.expert_out_offset, args.row_weights_grad_offset,
          EP_PHASE_GATHER_READY, EP_PHASE_GRADIENTS};
}

// Waits until every peer's rows are complete; notes where they lie.
__device__ bool wait_for_rows(const EpCombineArgs& args, int channel, GatherShared* shared) {
  const bool skip = mutated(args.context, Mutation::kGatherSkipEntry);
  const bool all = wait_for_entries(args.context, entry_of(args), channel, skip, &shared->watch,
                                    shared->rows_at, shared->grads_at);
  fence_proxy_async();  // G1
  return all;
}

// Tells every owner of rows that this channel has read all it needs.
__device__ void publish_done(const EpCombineArgs& args, int channel, const GatherShared& shared) {
  const EpContext& context = args.context;
  const Peers peers(context);
  __syncthreads();
  for (int rank = threadIdx.x; rank < context.shape.ep_size; rank += blockDim.x) {
    uint64_t* done = peers.at<uint64_t>(rank, context.window.gather_done) +
                     context.ep_rank * context.shape.num_channels + channel;
    store_release_sys(done, shared.watch.epoch);  // G2
  }
}

// Waits until this channel of every peer has read all it needs of this rank's rows.
__device__ void wait_for_readers(const EpCombineArgs& args, int channel, GatherShared* shared) {
  const EpContext& context = args.context;
  const Peers peers(context);
  const uint64_t* done = peers.at<uint64_t>(context.ep_rank, context.window.gather_done);
  for (int rank = threadIdx.x; rank < context.shape.ep_size; rank += blockDim.x) {
    wait_until(context, &shared->watch, done + rank * context.shape.num_channels + channel,
               shared->watch.epoch, {rank, EP_PHASE_GATHER_DONE, channel});  // G3
  }
}

// A load depends on no other rank's progress, so this wait needs no deadline.
__device__ __forceinline__ void wait_for_stage(const Gatherer& own, int stage, uint32_t parity) {
  while (!mbarrier_try(own.full + 8 * stage, parity)) {
  }
}

// Reads this lane's part of a stage; where the segment is shorter, what lies there.
__device__ __forceinline__ void read_stage(const Gatherer& own, int stage, uint4* raw) {
  const uint32_t from = own.stages + stage * kGatherStageBytes + 16 * own.lane;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    raw[pass] = load_shared(from + 512 * pass);
  }
}

// Sums all tokens of this warp.
template <EpDtype kDtype, bool kExact>
__device__ void sum_tokens(const Gatherer& own) {
  TermLoader loader(own);
  SegmentSum<kDtype, kExact> sum;
  int stage = 0;
  int segment = 0;
  uint32_t parity = 0;
  loader.start();
  while (!loader.empty()) {
    uint4 raw[kGatherPasses];
    wait_for_stage(own, stage, parity);
    uint32_t mark = 0;
    int token = 0;
    const bool early = mutated(own.args.context, Mutation::kGatherLoadFirst);
    if (early) {
      mark = loader.take_mark();
      token = loader.token(stage);
      loader.load(stage);
    }
    if (early || mutated(own.args.context, Mutation::kGatherReadLate)) {
      test_stall(own.args.context);
    }
    read_stage(own, stage, raw);
    mark = early ? mark : loader.take_mark();
    sum.add(raw, (mark & kEndsRank) != 0);
    if (!early) {
      token = (mark & kEndsToken) != 0 ? loader.token(stage) : 0;
      __syncwarp();  // G4
      loader.load(stage);
    }
    if ((mark & kEndsToken) != 0) {
      char* out = static_cast<char*>(own.args.out) + token * own.row_bytes +
                  int64_t{segment} * kGatherStageBytes;
      const int num_vectors = static_cast<int>(own.segment_bytes(segment)) / 16;
      if ((mark & kAlone) != 0) {
        store_vectors(out, raw, num_vectors);  // keeps its bits
      }
      sum.take(out, (mark & kAlone) != 0 ? 0 : num_vectors);
      segment = segment + 1 == own.segments ? 0 : segment + 1;
    }
    stage = stage + 1 == kGatherStages ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
  loader.finish();
}

template <EpDtype kDtype, bool kExact>
__device__ void gather(const EpCombineArgs& args, int channel, char* memory, GatherShared* shared) {
  if (threadIdx.x < kGatherWarps * kGatherStages) {
    mbarrier_init(shared->full + threadIdx.x, 1);
    fence_mbarrier_init();
  }
  const bool works = begin_launch(args.context, kCombine, &shared->watch);
  if (works && channel == 0) {
    announce(args.context, entry_of(args), shared->watch.epoch);  // G1
  }
  if (works && wait_for_rows(args, channel, shared)) {
    if (mutated(args.context, Mutation::kGatherDoneFirst)) {
      publish_done(args, channel, *shared);
    }
    if (mutated(args.context, Mutation::kGatherDoneFirst) ||
        mutated(args.context, Mutation::kGatherSkipDone)) {
      test_stall(args.context);  // late after its entry, so that peers get that far
    }
    sum_tokens<kDtype, kExact>(Gatherer(args, channel, memory, shared));
    publish_done(args, channel, *shared);
    if (!mutated(args.context, Mutation::kGatherSkipDone)) {
      wait_for_readers(args, channel, shared);
    }
  }
  end_launch(args.context, kCombine, shared->watch);
}

template <EpDtype kDtype, bool kExact, int kRanks>
__global__ void __launch_bounds__(32 * kGatherWarps, 1)
    gather_kernel(const __grid_constant__ World<EpCombineArgs, kRanks> world) {
  extern __shared__ __align__(128) char memory[];
  __shared__ GatherShared shared;
  const int channels = world.rank[0].context.shape.num_channels;
  gather<kDtype, kExact>(world.rank[rank_of_block<kRanks>(channels)],
                         static_cast<int>(blockIdx.x) % channels, memory, &shared);
}

template <EpDtype kDtype, bool kExact>
cudaError_t launch(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream) {
  const LaunchShape shape = {32 * kGatherWarps, kGatherSharedBytes};
  return num_ranks == 1
             ? launch_with<EpCombineArgs, 1>(gather_kernel<kDtype, kExact, 1>, ranks, 1, shape,
                                             stream)
             : launch_with<EpCombineArgs, EP_WORLD_RANKS>(
                   gather_kernel<kDtype, kExact, EP_WORLD_RANKS>, ranks, num_ranks, shape, stream);
}

}  // namespace

cudaError_t launch_gather(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream) {
  const bool exact = ranks[0].exact != 0;
  switch (ranks[0].dtype) {
    case EP_BFLOAT16:
      return exact ? launch<EP_BFLOAT16, true>(ranks, num_ranks, stream)
                   : launch<EP_BFLOAT16, false>(ranks, num_ranks, stream);
    case EP_FLOAT16:
      return exact ? launch<EP_FLOAT16, true>(ranks, num_ranks, stream)
                   : launch<EP_FLOAT16, false>(ranks, num_ranks, stream);
    default:
      return launch<EP_FLOAT32, true>(ranks, num_ranks, stream);  // nothing is rounded
  }
}

}  // namespace ep
