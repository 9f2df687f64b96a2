// route after the exchange: counts of all ranks become rows, and the received records get theirs.
#pragma once

#include "kernels/route.cuh"

namespace ep {

// Sum over the threads before this one, and of all in `total`. All threads call it.
__device__ inline uint32_t block_exclusive_sum(uint32_t value, uint32_t* warp_sums,
                                               uint32_t* total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint32_t inclusive = value;
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(~0u, inclusive, step);
    inclusive += lane >= step ? below : 0;
  }
  __syncthreads();
  if (lane == 31) {
    warp_sums[warp] = inclusive;
  }
  __syncthreads();
  uint32_t before = 0;
  uint32_t sum = 0;
  for (int other = 0; other < kRouteWarps; ++other) {
    before += other < warp ? warp_sums[other] : 0;
    sum += warp_sums[other];
  }
  *total = sum;
  return before + inclusive - value;
}

struct ExpertTotals {
  uint32_t all;    // copies from all ranks
  uint32_t below;  // from ranks below this one
};

__device__ inline ExpertTotals expert_totals(const RouteBlock& block, int expert) {
  ExpertTotals totals{0, 0};
  for (int source = 0; source < block.num_ranks; ++source) {
    const uint32_t count = __ldcg(block.counts_of(block.context.ep_rank, source) + expert);
    totals.below += source < block.context.ep_rank ? count : 0;
    totals.all += count;
  }
  return totals;
}

// Rows before each place of expert_order, wrapping at 2^32: differences within an owner are exact.
__device__ inline void scan_experts(const RouteBlock& block) {
  const auto alignment = static_cast<uint32_t>(block.args.alignment);
  uint32_t carried = 0;
  for (int first = 0; first < block.num_experts; first += blockDim.x) {
    const int place = first + static_cast<int>(threadIdx.x);
    const bool valid = place < block.num_experts;
    const int expert = valid ? __ldg(block.context.expert_order + place) : 0;
    const ExpertTotals totals = valid ? expert_totals(block, expert) : ExpertTotals{0, 0};
    const uint32_t padded = (totals.all + alignment - 1) / alignment * alignment;
    uint32_t sum = 0;
    const uint32_t before = block_exclusive_sum(padded, block.shared.warp_sums, &sum);
    if (valid) {
      block.shared.offset[place] = carried + before;
      block.shared.row_base[expert] = totals.below;
    }
    carried += sum;
  }
  __syncthreads();
}

// Turns `offset` into first rows on the owner and adds it to `row_base`.
__device__ inline void anchor_rows(const RouteBlock& block) {
  for (int place = threadIdx.x; place < block.num_experts; place += blockDim.x) {
    const int expert = __ldg(block.context.expert_order + place);
    const int owner = __ldg(block.context.expert_rank + expert);
    const uint32_t start = block.shared.offset[__ldg(block.context.owner_first + owner)];
    block.shared.row_base[expert] += block.shared.offset[place] - start;
  }
}

// First row of local expert `local`.
__device__ inline uint32_t local_offset(const RouteBlock& block, int local) {
  const int first = __ldg(block.context.owner_first + block.context.ep_rank);
  return block.shared.offset[first + local] - block.shared.offset[first];
}

__device__ inline int local_expert(const RouteBlock& block, int local) {
  const int first = __ldg(block.context.owner_first + block.context.ep_rank);
  return __ldg(block.context.expert_order + first + local);
}

// First rows of every source's copies for this rank's experts, and first records of every source.
__device__ inline void fill_local_bases(const RouteBlock& block) {
  const int me = block.context.ep_rank;
  for (int local = threadIdx.x; local < block.context.num_local_experts; local += blockDim.x) {
    uint32_t row = local_offset(block, local);
    const int expert = local_expert(block, local);
    for (int source = 0; source < block.num_ranks; ++source) {
      block.shared.local_base[local * block.num_ranks + source] = row;
      row += __ldcg(block.counts_of(me, source) + expert);
    }
  }
  if (threadIdx.x < 32) {
    int carried = 0;
    for (int first = 0; first < block.num_ranks; first += 32) {
      const int source = first + static_cast<int>(threadIdx.x);
      const int own = source < block.num_ranks
                          ? __ldcg(block.counts_of(me, source) + block.num_experts + me)
                          : 0;
      int inclusive = own;
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(~0u, inclusive, step);
        inclusive += static_cast<int>(threadIdx.x) >= step ? below : 0;
      }
      if (source < block.num_ranks) {
        block.shared.record_first[source] = carried + inclusive - own;
      }
      carried += __shfl_sync(~0u, inclusive, 31);
    }
    block.shared.record_first[block.num_ranks] = carried;
  }
  __syncthreads();
}

__device__ inline int64_t capacity_of(const RouteBlock& block, int64_t demand) {
  return block.args.capacity_rows < 0 ? demand : block.args.capacity_rows;
}

// Rows that this rank would need without a capacity.
__device__ inline int64_t demand_rows(const RouteBlock& block) {
  const int last = block.context.num_local_experts - 1;
  const uint32_t copies = expert_totals(block, local_expert(block, last)).all;
  const int64_t alignment = block.args.alignment;
  return int64_t{local_offset(block, last)} + align_up(copies, alignment);
}

// The rank to blame for a plan that must not be used; -1 where all agree. One whole warp calls it.
__device__ inline int refused_rank(const RouteBlock& block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int refused = block.num_ranks;
  for (int source = lane; source < block.num_ranks; source += 32) {
    const int32_t* extra = block.counts_of(block.context.ep_rank, source) + block.num_bins;
    if (__ldcg(extra + 1) != block.args.alignment || __ldcg(extra + 2) != 0) {
      refused = min(refused, source);
    }
  }
  refused = __reduce_min_sync(~0u, refused);
  return refused == block.num_ranks ? -1 : refused;
}

// Tells the host what it needs to allocate; the ticket goes last.
__device__ inline void fill_mailbox(const RouteBlock& block, int64_t demand) {
  EpMailbox* mailbox = block.args.mailbox;
  auto* experts = reinterpret_cast<volatile int64_t*>(mailbox + 1);
  for (int local = threadIdx.x; local < block.context.num_local_experts; local += blockDim.x) {
    experts[local] = block.args.plan.tokens_per_expert[local];
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    return;
  }
  const int refused = refused_rank(block);
  if (threadIdx.x == 0) {
    const int64_t bad = bad_slot(block);
    mailbox->num_rows = min_of(demand, capacity_of(block, demand));
    mailbox->demand_rows = demand;
    mailbox->num_records = block.shared.record_first[block.num_ranks];
    mailbox->bad_token = bad < 0 ? -1 : bad / block.num_topk;
    mailbox->bad_expert = bad < 0 ? -1 : block.args.topk_idx[bad];
    mailbox->refused_rank = refused;
    fence_sys();
    store_release_sys(&mailbox->ticket, block.args.ticket);
  }
}

// Block 0 writes what the plan says about this rank's experts.
__device__ inline void write_layout(const RouteBlock& block) {
  const EpPlan& plan = block.args.plan;
  const int64_t demand = demand_rows(block);
  const int64_t capacity = capacity_of(block, demand);
  for (int local = threadIdx.x; local < block.context.num_local_experts; local += blockDim.x) {
    const int64_t offset = min_of(local_offset(block, local), capacity);
    const int64_t real = expert_totals(block, local_expert(block, local)).all;
    plan.expert_offsets[local] = offset;
    plan.tokens_per_expert[local] = min_of(real, capacity - offset);
    plan.padded_tokens_per_expert[local] =
        min_of(align_up(real, block.args.alignment), capacity - offset);
  }
  for (int source = threadIdx.x; source < block.num_ranks; source += blockDim.x) {
    plan.source_tokens[source] =
        __ldcg(block.counts_of(block.context.ep_rank, source) + block.num_bins);
  }
  if (threadIdx.x == 0) {
    plan.totals[0] = min_of(demand, capacity);
    plan.totals[1] = demand;
    plan.totals[2] = block.shared.record_first[block.num_ranks];
    plan.totals[3] = 0;
  }
  __syncthreads();
  if (block.args.mailbox != nullptr) {
    fill_mailbox(block, demand);
  }
}

__device__ inline void copy_counts(const RouteBlock& block) {
  const int total = block.num_ranks * block.num_experts;
  const int step = static_cast<int>(blockDim.x) * block.num_channels;
  for (int at = block.channel * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
       at < total; at += step) {
    const int source = at / block.num_experts;
    block.args.plan.counts[at] =
        __ldcg(block.counts_of(block.context.ep_rank, source) + at % block.num_experts);
  }
}

// The contributor word of a slot, and its place in its token's list; place -1: it adds nothing.
struct Contribution {
  int place;
  uint64_t word;
};

// The slot that opens a record stands for its rank; ranks ascending; void if no row was kept.
__device__ inline Contribution contribution(const RouteBlock& block, int slot) {
  const int rank = block.shared.slot_rank[slot];
  const int pair = block.shared.slot_pair[slot];
  const int first = slot / block.num_topk * block.num_topk;
  int lower = 0;
  bool kept = false;
  for (int other = first; other < first + block.num_topk; ++other) {
    const int other_rank = block.shared.slot_rank[other];
    lower += block.shared.slot_pair[other] >= 0 && other_rank < rank ? 1 : 0;
    kept = kept || (other_rank == rank && block.shared.slot_entry[other] != ~0u);
  }
  const uint64_t word = static_cast<uint64_t>(pair) << kContributorRecordShift |
                        (kept ? 0 : kContributorVoid) | static_cast<uint64_t>(rank);
  return {pair < 0 ? -1 : lower, word};
}

// Brings back what keep_slot has kept of a tile.
__device__ inline void reload_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  load_tile(block, tile_slot, tile_slots);
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const uint64_t pair = block.args.plan.contributor[tile_slot + slot];
    block.shared.slot_entry[slot] =
        static_cast<uint32_t>(block.args.plan.dst_row[tile_slot + slot]);
    block.shared.slot_pair[slot] = pair == kNoContributor ? -1 : static_cast<int>(pair);
  }
  __syncthreads();
}

// Gives the slots of a tile their rows: `slot_entry` becomes the row, ~0 where it is dropped.
__device__ inline void place_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  const EpPlan& plan = block.args.plan;
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const int expert = block.shared.slot_expert[slot];
    uint32_t row = ~0u;
    if (expert >= 0) {
      row = block.shared.row_base[expert] + (block.shared.slot_entry[slot] & block.index_mask());
      if (block.args.capacity_rows >= 0 && int64_t{row} >= block.args.capacity_rows) {
        row = ~0u;
      }
    }
    block.shared.slot_entry[slot] = row;
    plan.dst_rank[tile_slot + slot] = row == ~0u ? -1 : block.shared.slot_rank[slot];
    plan.dst_row[tile_slot + slot] = static_cast<int32_t>(row);
  }
  __syncthreads();
}

__device__ inline void write_contributors(const RouteBlock& block, int64_t tile_slot,
                                          int tile_slots) {
  uint64_t* list = block.args.plan.contributor + tile_slot;
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const int first = slot / block.num_topk * block.num_topk;
    const Contribution mine = contribution(block, slot);
    if (mine.place >= 0) {
      list[first + mine.place] = mine.word;
    }
    int pairs = 0;
    for (int other = first; other < first + block.num_topk; ++other) {
      pairs += block.shared.slot_pair[other] >= 0 ? 1 : 0;
    }
    if (slot - first >= pairs) {
      list[slot] = kNoContributor;
    }
  }
  __syncthreads();
}

__device__ inline void place_tiles(const RouteBlock& block) {
  for (int64_t slot = block.first_slot; slot < block.end_slot; slot += block.tile_slots()) {
    const auto slots = static_cast<int>(min_of(block.tile_slots(), block.end_slot - slot));
    if (!block.one_tile()) {
      reload_tile(block, slot, slots);
    }
    place_tile(block, slot, slots);
    write_contributors(block, slot, slots);
  }
}

// Writes the rows of one received record; returns how many lie below the capacity.
__device__ inline int place_record(const RouteBlock& block, int record, int source, int index,
                                   int rows) {
  const uint32_t* entries =
      block.entries_of(block.context.ep_rank, source) + int64_t{index} * block.record_stride;
  int32_t* to = block.args.plan.record_row + int64_t{record} * block.record_stride;
  int kept = 0;
  for (int i = 0; i < rows; ++i) {
    const uint32_t entry = __ldcg(entries + i);
    const uint32_t local = entry >> block.index_bits;
    const uint32_t row =
        block.shared.local_base[local * block.num_ranks + source] + (entry & block.index_mask());
    if (block.args.capacity_rows < 0 || int64_t{row} < block.args.capacity_rows) {
      to[kept++] = static_cast<int32_t>(row);
    }
  }
  return kept;
}

// Record `index` of `source` starts every chunk between its predecessor's and its own; the last
// one also ends the list.
__device__ inline void mark_chunks(const RouteBlock& block, int record, int source, int index,
                                   int num_records) {
  const int me = block.context.ep_rank;
  const uint32_t* headers = block.headers_of(me, source);
  int32_t* first = block.args.plan.chunk_first + source * chunk_stride(block.context.shape);
  const int tokens = __ldcg(block.counts_of(me, source) + block.num_bins);
  const auto chunks = static_cast<int>(ceil_div(tokens, kChunkTokens));
  const auto chunk_at = [&](int at) {
    return static_cast<int>(__ldcg(headers + at) >> kRecordRowsBits) / kChunkTokens;
  };
  const int own = index < num_records ? chunk_at(index) : chunks;
  const int before = index > 0 ? chunk_at(index - 1) : -1;
  for (int chunk = before + 1; chunk <= own; ++chunk) {
    first[chunk] = record;
  }
}

// Each thread takes a record, or the end of a source's list.
__device__ inline void place_records(const RouteBlock& block) {
  const int total = block.shared.record_first[block.num_ranks] + block.num_ranks;
  const int idle = block.num_channels > 1 ? 1 : 0;  // block 0 has the mailbox to fill
  const int threads = static_cast<int>(blockDim.x);
  if (block.channel < idle) {
    return;
  }
  for (int item = (block.channel - idle) * threads + static_cast<int>(threadIdx.x); item < total;
       item += threads * (block.num_channels - idle)) {
    int source = 0;  // item = record + sources before it, as each list has one entry more
    while (item >= block.shared.record_first[source + 1] + source + 1) {
      ++source;
    }
    const int first = block.shared.record_first[source];
    const int record = item - source;
    const int index = record - first;
    const int num_records = block.shared.record_first[source + 1] - first;
    mark_chunks(block, record, source, index, num_records);
    if (index < num_records) {
      const uint32_t header = __ldcg(block.headers_of(block.context.ep_rank, source) + index);
      const int rows = static_cast<int>(header & kRecordRowsMask);
      const auto kept = static_cast<uint32_t>(place_record(block, record, source, index, rows));
      block.args.plan.record_header[record] = (header & ~kRecordRowsMask) | kept;
    }
  }
}

// Prefix sums, this rank's targets, the received records.
__device__ inline void finish_route(const RouteBlock& block) {
  if (mutated(block.context, Mutation::kRouteOneBuffer)) {
    test_stall(block.context);
  }
  scan_experts(block);
  anchor_rows(block);
  fill_local_bases(block);
  if (block.channel == 0) {
    write_layout(block);
  }
  copy_counts(block);
  place_tiles(block);
  place_records(block);
}

}  // namespace ep
