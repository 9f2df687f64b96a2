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

constexpr int kCountsAtOnce = 4;

// Adds up the ranks' copies for an expert; where it is this rank's, notes the sums on the way.
__device__ inline ExpertTotals expert_totals(const RouteBlock& block, int expert) {
  const int me = block.context.ep_rank;
  const bool mine = owner_rank(block, expert) == me;
  const int local = owner_local(block, expert);
  ExpertTotals totals{0, 0};
  for (int first = 0; first < block.num_ranks; first += kCountsAtOnce) {
    uint32_t count[kCountsAtOnce];
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      const int source = min(first + i, block.num_ranks - 1);
      count[i] = __ldcg(block.counts_of(me, source) + expert);
    }
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      const int source = first + i;
      if (source < block.num_ranks) {
        if (mine) {
          block.shared.local_base[local * block.num_ranks + source] = totals.all;
        }
        totals.below += source < me ? count[i] : 0;
        totals.all += count[i];
      }
    }
  }
  if (mine) {
    block.shared.local_total[local] = totals.all;
  }
  return totals;
}

// First records of every source. One whole warp calls it.
__device__ inline void scan_records(const RouteBlock& block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int me = block.context.ep_rank;
  int carried = 0;
  for (int first = 0; first < block.num_ranks; first += 32) {
    const int source = first + lane;
    const int own =
        source < block.num_ranks ? __ldcg(block.counts_of(me, source) + block.num_experts + me) : 0;
    int inclusive = own;
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, inclusive, step);
      inclusive += lane >= step ? below : 0;
    }
    if (source < block.num_ranks) {
      block.shared.record_first[source] = carried + inclusive - own;
    }
    carried += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) {
    block.shared.record_first[block.num_ranks] = carried;
  }
}

// Rows before each place of `order`, wrapping at 2^32: differences within an owner are exact.
__device__ inline void scan_experts(const RouteBlock& block) {
  const auto alignment = static_cast<uint32_t>(block.args.alignment);
  uint32_t carried = 0;
  if (threadIdx.x / 32 == kRouteWarps - 1) {
    scan_records(block);
  }
  for (int first = 0; first < block.num_experts; first += blockDim.x) {
    const int place = first + static_cast<int>(threadIdx.x);
    const bool valid = place < block.num_experts;
    const int expert = valid ? block.shared.order[place] : 0;
    const ExpertTotals totals = valid ? expert_totals(block, expert) : ExpertTotals{0, 0};
    const uint32_t padded = (totals.all + alignment - 1) / alignment * alignment;
    uint32_t sum = 0;
    const uint32_t before = block_exclusive_sum(padded, block.shared.warp_sums, &sum);
    if (valid) {
      block.shared.offset[place] = carried + before;
      block.shared.row_base[expert] =
          totals.below + static_cast<uint32_t>(block.shared.lower[expert]);
    }
    carried += sum;
  }
  __syncthreads();
}

// First row of local expert `local`.
__device__ inline uint32_t local_offset(const RouteBlock& block, int local) {
  const int first = block.shared.owner_first[block.context.ep_rank];
  return block.shared.offset[first + local] - block.shared.offset[first];
}

// Adds the first rows of experts on their owners to what counts from there.
__device__ inline void anchor_rows(const RouteBlock& block) {
  for (int place = threadIdx.x; place < block.num_experts; place += blockDim.x) {
    const int expert = block.shared.order[place];
    const int start = block.shared.owner_first[owner_rank(block, expert)];
    block.shared.row_base[expert] += block.shared.offset[place] - block.shared.offset[start];
  }
  const int entries = block.context.num_local_experts * block.num_ranks;
  for (int entry = threadIdx.x; entry < entries; entry += blockDim.x) {
    block.shared.local_base[entry] += local_offset(block, entry / block.num_ranks);
  }
  __syncthreads();
}

__device__ inline int64_t capacity_of(const RouteBlock& block, int64_t demand) {
  return block.args.capacity_rows < 0 ? demand : block.args.capacity_rows;
}

// Rows that this rank would need without a capacity.
__device__ inline int64_t demand_rows(const RouteBlock& block) {
  const int last = block.context.num_local_experts - 1;
  return int64_t{local_offset(block, last)} +
         align_up(block.shared.local_total[last], block.args.alignment);
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

// Rows of a local expert that lie below the capacity.
__device__ inline int64_t kept_rows(const RouteBlock& block, int local, int64_t capacity) {
  const int64_t offset = min_of(local_offset(block, local), capacity);
  return min_of(block.shared.local_total[local], capacity - offset);
}

// Tells the host what it needs to allocate, or only what is wrong; the ticket goes last.
__device__ inline void fill_mailbox(const RouteBlock& block, int64_t demand, int64_t capacity) {
  EpMailbox* mailbox = block.args.mailbox;
  const bool always = block.args.only_refusals == 0;
  auto* experts = reinterpret_cast<volatile int64_t*>(mailbox + 1);
  for (int local = threadIdx.x; always && local < block.context.num_local_experts;
       local += blockDim.x) {
    experts[local] = kept_rows(block, local, capacity);
  }
  const int refused = threadIdx.x < 32 ? refused_rank(block) : -1;
  __syncthreads();
  const bool told = block.args.verdict != nullptr && block.args.verdict[0] >= 0;
  if (threadIdx.x == 0 && (always || refused >= 0 || told)) {
    const int64_t bad = bad_slot(block);
    mailbox->num_rows = min_of(demand, capacity);
    mailbox->demand_rows = demand;
    mailbox->num_records = block.shared.record_first[block.num_ranks];
    mailbox->bad_token = bad < 0 ? -1 : bad / block.num_topk;
    mailbox->bad_expert = bad < 0 ? -1 : block.args.topk_idx[bad];
    mailbox->refused_rank = refused;
    if (block.args.verdict != nullptr) {
      mailbox->refused_rank = block.args.verdict[0];
      mailbox->bad_token = block.args.verdict[1];
      mailbox->bad_expert = block.args.verdict[2];
    }
    fence_sys();
    store_release_sys(&mailbox->ticket, block.args.ticket);
  }
}

// Block 0 writes what the plan says about this rank's experts.
__device__ inline void write_layout(const RouteBlock& block) {
  const EpPlan& plan = block.args.plan;
  const int64_t demand = demand_rows(block);
  const int64_t capacity = capacity_of(block, demand);
  if (block.args.mailbox != nullptr) {
    fill_mailbox(block, demand, capacity);
  }
  for (int local = threadIdx.x; local < block.context.num_local_experts; local += blockDim.x) {
    const int64_t offset = min_of(local_offset(block, local), capacity);
    const int64_t padded = align_up(block.shared.local_total[local], block.args.alignment);
    plan.expert_offsets[local] = offset;
    plan.tokens_per_expert[local] = kept_rows(block, local, capacity);
    plan.padded_tokens_per_expert[local] = min_of(padded, capacity - offset);
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
  const int record = pair < 0 ? 0 : pair + block.shared.lower[block.num_experts + rank];
  const uint64_t word = static_cast<uint64_t>(record) << kContributorRecordShift |
                        (kept ? 0 : kContributorVoid) | static_cast<uint64_t>(rank);
  return {pair < 0 ? -1 : lower, word};
}

// How much later than its source's other rows those of a token's segment start; wraps at 2^32.
__device__ inline uint32_t segment_shift(const RouteBlock& block, int source, int64_t token,
                                         int expert) {
  const EpRouteArgs& args = block.args;
  if (args.segment_shift == nullptr) {
    return 0;
  }
  const int64_t segments = block.context.shape.max_tokens / args.segment_tokens;
  const int64_t row = source * segments + token / args.segment_tokens;
  return static_cast<uint32_t>(__ldg(args.segment_shift + row * block.num_experts + expert));
}

// Gives the slots of a tile their rows: `slot_entry` becomes the row, ~0 where it is dropped.
__device__ inline void place_tile(const RouteBlock& block, int64_t tile_slot, int tile_slots) {
  const EpPlan& plan = block.args.plan;
  for (int slot = threadIdx.x; slot < tile_slots; slot += blockDim.x) {
    const int expert = block.shared.slot_expert[slot];
    uint32_t row = ~0u;
    if (expert >= 0) {
      row =
          block.shared.row_base[expert] + (block.shared.slot_entry[slot] & block.index_mask()) +
          segment_shift(block, block.context.ep_rank, (tile_slot + slot) / block.num_topk, expert);
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

constexpr int kEntriesAtOnce = 8;

struct Entries {
  uint32_t entry[kEntriesAtOnce];
};

// The next entries of a record, those beyond its room left out; all loads are in flight together.
__device__ inline Entries read_entries(const uint32_t* from, int left) {
  Entries entries;
  if (left >= kEntriesAtOnce && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0) {
    const auto* vectors = reinterpret_cast<const uint4*>(from);
    const uint4 low = __ldcg(vectors);
    const uint4 high = __ldcg(vectors + 1);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
#pragma unroll
  for (int i = 0; i < kEntriesAtOnce; ++i) {
    entries.entry[i] = i < left ? __ldcg(from + i) : 0;
  }
  return entries;
}

// Writes the rows of one received record; returns how many lie below the capacity.
__device__ inline int place_record(const RouteBlock& block, int record, int source, uint32_t header,
                                   const uint32_t* from, Entries entries) {
  const auto rows = static_cast<int>(header & kRecordRowsMask);
  const int first_expert = block.shared.owner_first[block.context.ep_rank];
  int32_t* to = block.args.plan.record_row + int64_t{record} * block.record_stride;
  int kept = 0;
  for (int first = 0; first < rows; first += kEntriesAtOnce) {
    if (first > 0) {
      entries = read_entries(from + first, block.record_stride - first);
    }
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce; ++i) {
      if (first + i < rows) {
        const uint32_t entry = entries.entry[i];
        const uint32_t local = entry >> block.index_bits;
        const uint32_t row = block.shared.local_base[local * block.num_ranks + source] +
                             (entry & block.index_mask()) +
                             segment_shift(block, source, header >> kRecordRowsBits,
                                           block.shared.order[first_expert + local]);
        if (block.args.capacity_rows < 0 || int64_t{row} < block.args.capacity_rows) {
          to[kept++] = static_cast<int32_t>(row);
        }
      }
    }
  }
  return kept;
}

// A record of `source` starts every chunk between its predecessor's and its own; the end of the
// list starts those that are left, and the end of the last one.
__device__ inline void mark_chunks(const RouteBlock& block, int record, int source, int before,
                                   int own) {
  int32_t* first = block.args.plan.chunk_first + source * chunk_stride(block.context.shape);
  for (int chunk = before + 1; chunk <= own; ++chunk) {
    first[chunk] = record;
  }
}

__device__ inline int chunk_of(uint32_t header) {
  return static_cast<int>(header >> kRecordRowsBits) / kChunkTokens;
}

// Record `index` of a source, or the end of its list.
__device__ inline void place_item(const RouteBlock& block, int source, int index) {
  const int me = block.context.ep_rank;
  const int list_first = block.shared.record_first[source];
  const int record = list_first + index;
  const bool is_end = record == block.shared.record_first[source + 1];
  const uint32_t* headers = block.headers_of(me, source);
  const uint32_t* from = block.entries_of(me, source) + int64_t{index} * block.record_stride;
  const uint32_t header = is_end ? 0 : __ldcg(headers + index);
  const uint32_t earlier = index > 0 ? __ldcg(headers + index - 1) : 0;
  const Entries entries = is_end ? Entries{} : read_entries(from, block.record_stride);
  const int before = index > 0 ? chunk_of(earlier) : -1;
  if (is_end) {
    const int tokens = __ldcg(block.counts_of(me, source) + block.num_bins);
    mark_chunks(block, record, source, before, static_cast<int>(ceil_div(tokens, kChunkTokens)));
    return;
  }
  mark_chunks(block, record, source, before, chunk_of(header));
  const auto kept =
      static_cast<uint32_t>(place_record(block, record, source, header, from, entries));
  block.args.plan.record_header[record] = (header & ~kRecordRowsMask) | kept;
}

// Each thread takes a record, or the end of a source's list.
__device__ inline void place_records(const RouteBlock& block) {
  const int total = block.shared.record_first[block.num_ranks] + block.num_ranks;
  const int idle = block.num_channels > 1 ? 1 : 0;  // block 0 has the mailbox to fill
  const int threads = static_cast<int>(blockDim.x);
  if (block.channel < idle) {
    return;
  }
  int source = 0;
  for (int item = (block.channel - idle) * threads + static_cast<int>(threadIdx.x); item < total;
       item += threads * (block.num_channels - idle)) {
    while (item >= block.shared.record_first[source + 1] + source + 1) {
      ++source;  // item = record + sources before it, as each list has one entry more
    }
    place_item(block, source, item - source - block.shared.record_first[source]);
  }
}

// Prefix sums, this rank's targets, the received records.
__device__ inline void finish_route(const RouteBlock& block) {
  if (mutated(block.context, Mutation::kRouteOneBuffer)) {
    test_stall(block.context);
  }
  scan_experts(block);
  anchor_rows(block);
  if (block.channel == 0) {
    write_layout(block);
  }
  copy_counts(block);
  place_tiles(block);
  place_records(block);
}

}  // namespace ep
