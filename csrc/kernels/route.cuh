// route, shared pieces: what a block knows, where it keeps it, and the steps after the exchange.
#pragma once

#include "core/window_layout.h"
#include "kernels/launch.cuh"

namespace ep {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kSlotsPerThread = 4;
constexpr int kTileSlots = kRouteThreads * kSlotsPerThread;

// bad_slot: epoch above, complement of the lowest bad slot below, so that a maximum keeps both.
constexpr int kBadSlotBits = 27;
constexpr uint64_t kBadSlotMask = (1ull << kBadSlotBits) - 1;

// A slot's choice, from the tile in shared memory. `opens_record`: no lower slot of its token goes
// to the same rank.
struct Slot {
  int expert, rank;
  bool opens_record;
};

// Shared memory of a block. The third group takes the place of the second after the exchange.
struct RouteShared {
  uint32_t* slot_entry;  // [kTileSlots] local expert and index among the block's copies
  int32_t* slot_rank;    // [kTileSlots]
  int32_t* slot_pair;    // [kTileSlots] record that the slot opens, among the block's; -1
  int32_t* slot_expert;  // [kTileSlots] -1 where nothing is sent
  uint32_t* owner;       // [E] rank in the high half, local expert in the low one
  int32_t* order;        // [E] experts by (owner, id)
  int32_t* owner_first;  // [P + 1] first place of each owner in `order`
  int32_t* lower;        // [E + P] counts of lower blocks

  int32_t* running;     // [E + P] counts so far
  int32_t* warp_first;  // [warps][E + P]

  uint32_t* row_base;     // [E] row of this block's first copy for each expert
  uint32_t* offset;       // [E] first row of each expert on its owner, by place in `order`
  uint32_t* local_base;   // [L][P] row of each source's first copy for each local expert
  uint32_t* local_total;  // [L] copies from all ranks
  int32_t* record_first;  // [P + 1] records of lower sources
  uint32_t* warp_sums;    // [warps]
};

__host__ __device__ inline int64_t route_table_words(const EpWindowShape& shape) {
  return 4 * int64_t{kTileSlots} + 3 * int64_t{shape.num_experts} + 2 * int64_t{shape.ep_size} + 1;
}

__host__ __device__ inline int64_t route_count_words(const EpWindowShape& shape) {
  return int64_t{kRouteWarps + 1} * (shape.num_experts + shape.ep_size);
}

__host__ __device__ inline int64_t route_base_words(const EpContext& context) {
  const EpWindowShape& shape = context.shape;
  return 2 * int64_t{shape.num_experts} + int64_t{context.num_local_experts} * (shape.ep_size + 1) +
         shape.ep_size + 1 + kRouteWarps;
}

inline int64_t route_shared_bytes(const EpContext& context) {
  return 4 * (route_table_words(context.shape) +
              max_of(route_count_words(context.shape), route_base_words(context)));
}

// One block's view of the call.
struct RouteBlock {
  __device__ RouteBlock(const EpRouteArgs& route_args, int block_channel, char* memory, Watch* w)
      : args(route_args), context(route_args.context), peers(route_args.context), watch(w) {
    channel = block_channel;
    num_channels = context.shape.num_channels;
    num_ranks = context.shape.ep_size;
    num_experts = context.shape.num_experts;
    num_bins = num_experts + num_ranks;
    num_topk = args.plan.num_topk;
    record_stride = context.shape.num_topk;
    index_bits = bits_for(context.shape.max_tokens * context.shape.num_topk + 1);
    const int64_t tokens = args.plan.num_tokens;
    first_slot = tokens * channel / num_channels * num_topk;
    end_slot = tokens * (channel + 1) / num_channels * num_topk;
    tile_tokens = kTileSlots / num_topk;
    divide(reinterpret_cast<uint32_t*>(memory));
  }

  // Splits the block's shared memory.
  __device__ void divide(uint32_t* words) {
    shared.slot_entry = words;
    shared.slot_rank = reinterpret_cast<int32_t*>(words + kTileSlots);
    shared.slot_pair = reinterpret_cast<int32_t*>(words + 2 * kTileSlots);
    shared.slot_expert = reinterpret_cast<int32_t*>(words + 3 * kTileSlots);
    shared.owner = words + 4 * kTileSlots;
    shared.order = reinterpret_cast<int32_t*>(shared.owner + num_experts);
    shared.owner_first = shared.order + num_experts;
    shared.lower = shared.owner_first + num_ranks + 1;
    uint32_t* rest = words + route_table_words(context.shape);
    shared.running = reinterpret_cast<int32_t*>(rest);
    shared.warp_first = shared.running + num_bins;
    shared.row_base = rest;
    shared.offset = shared.row_base + num_experts;
    shared.local_base = shared.offset + num_experts;
    shared.local_total = shared.local_base + context.num_local_experts * num_ranks;
    uint32_t* after = shared.local_total + context.num_local_experts;
    shared.record_first = reinterpret_cast<int32_t*>(after);
    shared.warp_sums = after + num_ranks + 1;
  }

  // Whether all slots of the block stay in shared memory from the first step to the last.
  __device__ bool one_tile() const { return end_slot - first_slot <= tile_slots(); }
  __device__ uint32_t index_mask() const { return (1u << index_bits) - 1; }
  __device__ int tile_slots() const { return tile_tokens * num_topk; }
  __device__ int slots_at(int64_t slot) const {
    return static_cast<int>(min_of(tile_slots(), end_slot - slot));
  }

  template <class T>
  __device__ T* local(int64_t offset) const {
    return peers.at<T>(context.ep_rank, offset);
  }

  // O3: which of the two exchange buffers this launch uses.
  __device__ int64_t parity() const {
    return mutated(context, Mutation::kRouteOneBuffer) ? 0 : static_cast<int64_t>(watch->epoch % 2);
  }

  // Counts row, record headers and entries that `source` leaves at `rank`.
  __device__ int32_t* counts_of(int rank, int source) const {
    const int64_t row = parity() * num_ranks + source;
    return peers.at<int32_t>(rank, context.window.counts) + row * (num_bins + EP_COUNTS_EXTRA);
  }
  __device__ uint32_t* headers_of(int rank, int source) const {
    const int64_t row = parity() * num_ranks + source;
    return peers.at<uint32_t>(rank, context.window.record_header) + row * context.shape.max_tokens;
  }
  __device__ uint32_t* entries_of(int rank, int source) const {
    const int64_t row = parity() * num_ranks + source;
    return peers.at<uint32_t>(rank, context.window.record_entry) +
           row * context.shape.max_tokens * record_stride;
  }
  // The word at `peer` that says that this block's part has arrived.
  __device__ uint64_t* flag_of(int peer) const {
    return peers.at<uint64_t>(peer, context.window.route_flag) + context.ep_rank * num_channels +
           channel;
  }

  const EpRouteArgs& args;
  const EpContext& context;
  Peers peers;
  Watch* watch;
  RouteShared shared;
  int channel, num_channels, num_ranks, num_experts, num_bins, num_topk, record_stride, index_bits;
  int tile_tokens;
  int64_t first_slot, end_slot;
};

// A tile's ids on their way from memory, one register a slot.
struct TileIds {
  int64_t expert[kSlotsPerThread];
};

__device__ inline TileIds fetch_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  TileIds ids;
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int slot = i * kRouteThreads + static_cast<int>(threadIdx.x);
    ids.expert[i] = slot < tile_slots ? __ldg(block.args.topk_idx + tile_slot + slot) : -1;
  }
  return ids;
}

__device__ inline int owner_rank(const RouteBlock& block, int expert) {
  return static_cast<int>(block.shared.owner[expert] >> 16);
}
__device__ inline int owner_local(const RouteBlock& block, int expert) {
  return static_cast<int>(block.shared.owner[expert] & 0xffff);
}

// Brings the tables of experts into shared memory. A __syncthreads must follow.
__device__ inline void load_tables(const RouteBlock& block) {
  const EpContext& context = block.context;
  for (int expert = threadIdx.x; expert < block.num_experts; expert += blockDim.x) {
    const int rank = __ldg(context.expert_rank + expert);
    const int local = __ldg(context.expert_local + expert);
    const int order = __ldg(context.expert_order + expert);
    block.shared.owner[expert] = static_cast<uint32_t>(rank) << 16 | static_cast<uint32_t>(local);
    block.shared.order[expert] = order;
  }
  for (int rank = threadIdx.x; rank <= block.num_ranks; rank += blockDim.x) {
    block.shared.owner_first[rank] = __ldg(context.owner_first + rank);
  }
}

// An id outside [-1, E) is noted and counts as dropped.
__device__ inline void note_bad_slot(const RouteBlock& block, int64_t slot) {
  LocalControl* control = block.local<LocalControl>(block.context.window.local);
  const uint64_t note = block.watch->epoch << kBadSlotBits | (kBadSlotMask - slot);
  atomicMax(reinterpret_cast<unsigned long long*>(&control->bad_slot), note);
}

// Brings the experts and ranks of a tile's slots into shared memory.
__device__ inline void load_tile(const RouteBlock& block, const TileIds& ids, int64_t tile_slot,
                                 int tile_slots) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int slot = i * kRouteThreads + static_cast<int>(threadIdx.x);
    if (slot < tile_slots) {
      const int64_t id = ids.expert[i];
      // One that no rank of this domain has is bad as well.
      const int rank = id >= 0 && id < block.num_experts ? owner_rank(block, static_cast<int>(id))
                                                         : block.num_ranks;
      const bool valid = rank < block.num_ranks;
      if (!valid && id != -1) {
        note_bad_slot(block, tile_slot + slot);
      }
      block.shared.slot_expert[slot] = valid ? static_cast<int>(id) : -1;
      block.shared.slot_rank[slot] = valid ? rank : -1;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ Slot read_slot(const RouteBlock& block, int slot) {
  const int rank = block.shared.slot_rank[slot];
  bool opens = rank >= 0;
  for (int lower = slot / block.num_topk * block.num_topk; lower < slot; ++lower) {
    opens = opens && block.shared.slot_rank[lower] != rank;
  }
  return {block.shared.slot_expert[slot], rank, opens};
}

// The slot of this rank with a bad id, lowest first; -1 where there is none. After the grid barrier.
__device__ inline int64_t bad_slot(const RouteBlock& block) {
  const LocalControl* control = block.local<LocalControl>(block.context.window.local);
  const uint64_t note = load_relaxed_sys(&control->bad_slot);
  return note >> kBadSlotBits == block.watch->epoch
             ? static_cast<int64_t>(kBadSlotMask - (note & kBadSlotMask))
             : -1;
}

// Words after the counts in this rank's message.
__device__ inline int extra_word(const RouteBlock& block, int word) {
  if (word == 0) {
    return static_cast<int>(block.args.plan.num_tokens);
  }
  return word == 1 ? block.args.alignment : (bad_slot(block) >= 0 ? 1 : 0);
}

__device__ inline uint32_t entry_of(const RouteBlock& block, int expert, int copy) {
  return static_cast<uint32_t>(owner_local(block, expert)) << block.index_bits |
         static_cast<uint32_t>(copy);
}

// Keeps a slot's index for the push and for the targets after the exchange: in shared memory, and
// in the plan if other tiles will take its place there.
__device__ inline void keep_slot(const RouteBlock& block, int64_t tile_slot, int slot, Slot choice,
                                 int copy, int pair) {
  block.shared.slot_entry[slot] = choice.expert >= 0 ? entry_of(block, choice.expert, copy) : ~0u;
  block.shared.slot_pair[slot] = pair;
  if (!block.one_tile()) {
    block.args.plan.dst_row[tile_slot + slot] = copy;
    block.args.plan.contributor[tile_slot + slot] =
        pair < 0 ? kNoContributor : static_cast<uint64_t>(pair);
  }
}

// Brings back what keep_slot has kept of a tile.
__device__ inline void reload_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  load_tile(block, fetch_tile(block, tile_slot, tile_slots), tile_slot, tile_slots);
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const int expert = block.shared.slot_expert[slot];
    const uint64_t pair = block.args.plan.contributor[tile_slot + slot];
    block.shared.slot_entry[slot] =
        expert < 0 ? ~0u : entry_of(block, expert, block.args.plan.dst_row[tile_slot + slot]);
    block.shared.slot_pair[slot] = pair == kNoContributor ? -1 : static_cast<int>(pair);
  }
  __syncthreads();
}

}  // namespace ep
