// route: turn topk_idx into addresses, on all ranks at once.
//
// Data flow   topk_idx -> each copy's index among its block's copies of its expert -> (grid
//             barrier) -> counts of lower blocks -> counts and records to every peer -> (flags of
//             all peers) -> prefix sums over ranks and experts -> targets of own copies, and the
//             received records with their rows.
//             Record u of source s at rank d: the u-th token of s, in token order, that has a copy
//             on d, and the rows of its copies there, ascending. It travels as (local expert, index)
//             pairs, which need no counts of other ranks, so one exchange is enough.
// Grid        num_channels blocks; block b owns tokens [b T / C, (b + 1) T / C), in tiles.
// Invariants  I1 an index is a count of earlier (token, slot) pairs: no atomic decides an order.
//             I2 rows at or past the capacity are dropped; sender and receiver find the same ones.
//             I3 local epochs only grow: nothing is reset, a CUDA graph can replay.
// Ordering    O1 counts and records -> __syncthreads -> fence at system scope -> route_flag.
//             O2 route_flag (acquire) -> __syncthreads -> reads of counts and records.
//             O3 the exchange has two buffers, by parity of the epoch. A rank writes epoch e + 1
//                after it has seen every peer's flag of epoch e; that peer had ended its kernel of
//                epoch e - 1, the last reader of the buffer.
//             O4 block counts -> __syncthreads -> release of grid_flag; acquire -> reads of counts.
// Failure     an expired wait files a fault; ids outside [-1, E) count as dropped and are reported.
#include "kernels/route_finish.cuh"

namespace ep {
namespace {

// Waits until every block of this rank has come here.
__device__ bool grid_barrier(const RouteBlock& block) {
  const EpContext& context = block.context;
  LocalControl* control = block.local<LocalControl>(context.window.local);
  __syncthreads();
  if (threadIdx.x == 0) {
    store_release_gpu(&control->grid_flag[block.channel], block.watch->epoch);  // O4
  }
  const bool skip = mutated(context, Mutation::kRouteSkipGrid);
  bool here = true;
  for (int other = threadIdx.x; here && !skip && other < block.num_channels; other += blockDim.x) {
    here = wait_until(context, block.watch, &control->grid_flag[other], block.watch->epoch,
                      {context.ep_rank, EP_PHASE_ROUTE_GRID, other});
  }
  return __syncthreads_and(here ? 1 : 0) != 0;
}

// Finds the counts of lower blocks and pushes this rank's totals to its peers.
__device__ void push_counts(const RouteBlock& block) {
  const EpContext& context = block.context;
  const int32_t* counts = block.local<int32_t>(context.window.block_counts);
  const int num_words = block.num_bins + EP_COUNTS_EXTRA;
  for (int bin = threadIdx.x; bin < num_words; bin += blockDim.x) {
    int lower = 0;
    int total = 0;
    if (bin < block.num_bins) {
#pragma unroll 16
      for (int other = 0; other < block.num_channels; ++other) {
        const int count = __ldcg(counts + other * block.num_bins + bin);
        lower += other < block.channel ? count : 0;
        total += count;
      }
      block.shared.lower[bin] = lower;
    } else {
      total = extra_word(block, bin - block.num_bins);
    }
    for (int peer = block.channel; peer < block.num_ranks; peer += block.num_channels) {
      block.counts_of(peer, context.ep_rank)[bin] = total;
    }
  }
  __syncthreads();
}

// Per-warp counts of a tile become the first index of each warp for each bin.
__device__ void prefix_over_warps(const RouteBlock& block) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < block.num_bins; bin += blockDim.x) {
    int32_t* entry = block.shared.warp_first + bin;
    int count[kRouteWarps];
#pragma unroll
    for (int warp = 0; warp < kRouteWarps; ++warp) {
      count[warp] = entry[warp * block.num_bins];
    }
    int first = block.shared.running[bin];
#pragma unroll
    for (int warp = 0; warp < kRouteWarps; ++warp) {
      entry[warp * block.num_bins] = first;
      first += count[warp];
    }
    block.shared.running[bin] = first;
  }
  __syncthreads();
}

// Numbers this lane's slot among those of its warp with the same bin; -1 takes no part.
__device__ int number_in_warp(int32_t* warp_counts, int bin) {
  const int lane = threadIdx.x % 32;
  const unsigned same = __match_any_sync(~0u, bin);
  const int earlier = __popc(same & ((1u << lane) - 1));
  const int base = bin >= 0 ? warp_counts[bin] : 0;
  __syncwarp();
  if (bin >= 0 && earlier == 0) {
    warp_counts[bin] = base + __popc(same);
  }
  __syncwarp();
  return base + earlier;
}

// Gives every slot of the tile its index among this block's copies of its expert, and every first
// slot of a (token, rank) pair the index of its record.
__device__ void number_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  const int warp = threadIdx.x / 32;
  int32_t* warp_counts = block.shared.warp_first + warp * block.num_bins;
  for (int bin = threadIdx.x % 32; bin < block.num_bins; bin += 32) {
    warp_counts[bin] = 0;
  }
  __syncwarp();
  int index[kSlotsPerThread];
  int record[kSlotsPerThread];
  Slot choice[kSlotsPerThread];
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int slot = (warp * kSlotsPerThread + i) * 32 + threadIdx.x % 32;
    choice[i] = slot < tile_slots ? read_slot(block, slot) : Slot{-1, -1, false};
    index[i] = number_in_warp(warp_counts, choice[i].expert);
    record[i] = number_in_warp(warp_counts,
                               choice[i].opens_record ? block.num_experts + choice[i].rank : -1);
  }
  prefix_over_warps(block);
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int slot = (warp * kSlotsPerThread + i) * 32 + threadIdx.x % 32;
    if (slot < tile_slots) {
      const bool valid = choice[i].expert >= 0;
      const int copy = valid ? index[i] + warp_counts[choice[i].expert] : 0;
      const int pair =
          choice[i].opens_record ? record[i] + warp_counts[block.num_experts + choice[i].rank] : -1;
      keep_slot(block, tile_slot, slot, choice[i], copy, pair);
    }
  }
  __syncthreads();
}

// Numbers the slots of all tiles; leaves the block's counts for the others of this rank.
__device__ void number_block(const RouteBlock& block, TileIds ids) {
  for (int bin = threadIdx.x; bin < block.num_bins; bin += blockDim.x) {
    block.shared.running[bin] = 0;
  }
  for (int64_t slot = block.first_slot; slot < block.end_slot; slot += block.tile_slots()) {
    const int slots = block.slots_at(slot);
    load_tile(block, ids, slot, slots);
    const int64_t next = slot + block.tile_slots();
    if (next < block.end_slot) {
      ids = fetch_tile(block, next, block.slots_at(next));
    }
    number_tile(block, slot, slots);
  }
  __syncthreads();
  int32_t* counts = block.local<int32_t>(block.context.window.block_counts);
  for (int bin = threadIdx.x; bin < block.num_bins; bin += blockDim.x) {
    counts[block.channel * block.num_bins + bin] = block.shared.running[bin];
  }
}

// Writes each slot's part of its record into the staging area of the record's rank.
__device__ void push_records(const RouteBlock& block, int64_t tile_token, int tile_slots) {
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const int rank = block.shared.slot_rank[slot];
    if (rank < 0) {
      continue;
    }
    const int first = slot / block.num_topk * block.num_topk;
    const uint32_t entry = block.shared.slot_entry[slot];
    int rows = 0;
    int position = 0;
    int pair = -1;
    for (int other = first; other < first + block.num_topk; ++other) {
      if (block.shared.slot_rank[other] == rank) {
        ++rows;
        position += block.shared.slot_entry[other] < entry ? 1 : 0;
        pair = max(pair, block.shared.slot_pair[other]);
      }
    }
    pair += block.shared.lower[block.num_experts + rank];
    const int lower = block.shared.lower[block.shared.slot_expert[slot]];
    block.entries_of(rank, block.context.ep_rank)[pair * block.record_stride + position] =
        entry + static_cast<uint32_t>(lower);
    if (position == 0) {
      const auto token = static_cast<uint32_t>(tile_token + slot / block.num_topk);
      block.headers_of(rank, block.context.ep_rank)[pair] = token << kRecordRowsBits | rows;
    }
  }
}

__device__ void push_tiles(const RouteBlock& block) {
  for (int64_t slot = block.first_slot; slot < block.end_slot; slot += block.tile_slots()) {
    const int slots = block.slots_at(slot);
    if (!block.one_tile()) {
      reload_tile(block, slot, slots);
    }
    push_records(block, slot / block.num_topk, slots);
  }
}

__device__ void publish(const RouteBlock& block) {
  __syncthreads();
  for (int peer = threadIdx.x; peer < block.num_ranks; peer += blockDim.x) {
    fence_sys();  // O1
    store_relaxed_sys(block.flag_of(peer), block.watch->epoch);
  }
}

__device__ bool wait_for_peers(const RouteBlock& block) {
  const EpContext& context = block.context;
  const uint64_t* flags = block.local<uint64_t>(context.window.route_flag);
  const int words = block.num_ranks * block.num_channels;
  bool here = true;
  for (int word = threadIdx.x; word < words && here; word += blockDim.x) {
    if (!mutated(context, Mutation::kRouteSkipWait)) {
      here =
          wait_until(context, block.watch, flags + word, block.watch->epoch,  // O2
                     {word / block.num_channels, EP_PHASE_ROUTE_COUNTS, word % block.num_channels});
    }
  }
  return __syncthreads_and(here ? 1 : 0) != 0;
}

__device__ void exchange(const RouteBlock& block) {
  if (mutated(block.context, Mutation::kRouteFlagFirst)) {
    publish(block);
    test_stall(block.context);
  }
  push_counts(block);
  push_tiles(block);
  publish(block);
}

__device__ void route(const EpRouteArgs& args, int channel, char* shared, Watch* watch) {
  const RouteBlock block(args, channel, shared, watch);
  const TileIds ids = fetch_tile(block, block.first_slot, block.slots_at(block.first_slot));
  load_tables(block);
  if (begin_launch(args.context, kRoute, watch)) {
    if (mutated(args.context, Mutation::kRouteSkipGrid) && channel == block.num_channels - 1) {
      test_stall(args.context);
    }
    number_block(block, ids);
    if (grid_barrier(block)) {
      exchange(block);
      if (wait_for_peers(block)) {
        finish_route(block);
      }
    }
  }
  end_launch(args.context, kRoute, *watch);
}

template <int kRanks>
__global__ void __launch_bounds__(kRouteThreads, 1)
    route_kernel(const __grid_constant__ World<EpRouteArgs, kRanks> world) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Watch watch;
  const int channels = world.rank[0].context.shape.num_channels;
  route(world.rank[rank_of_block<kRanks>(channels)], static_cast<int>(blockIdx.x) % channels,
        shared, &watch);
}

}  // namespace

cudaError_t launch_route(const EpRouteArgs* ranks, int num_ranks, cudaStream_t stream) {
  int64_t shared_bytes = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    shared_bytes = max_of(shared_bytes, route_shared_bytes(ranks[rank].context));
  }
  const LaunchShape shape = {kRouteThreads, shared_bytes};
  return num_ranks == 1 ? launch_with<EpRouteArgs, 1>(route_kernel<1>, ranks, 1, shape, stream)
                        : launch_with<EpRouteArgs, EP_WORLD_RANKS>(route_kernel<EP_WORLD_RANKS>,
                                                                   ranks, num_ranks, shape, stream);
}

}  // namespace ep
