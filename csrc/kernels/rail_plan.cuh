// The rails' part of a plan: two kernels before route.
//
// rail_exchange
//   Data flow   topk_idx --16 bits a slot--> own part --put, signal--> the rail's other ranks;
//               all D segments' parts -> virtual_topk, where experts outside this domain are -1,
//               and the parts' histograms.
//   Grid        num_channels blocks; block b handles tokens [b n, (b + 1) n) of every segment.
// rail_counts
//   Data flow   histograms of own segments -> every peer of the domain (flags) -> counts of all
//               ranks; from them the shifts of segments (route), the targets of own tokens
//               anywhere, and whom to blame for a plan that must not be used.
//   Grid        num_channels blocks; block b pushes segments b, b + C, ...
// Ordering    R6, and R1, R2 for the parts (rail.cuh); counts as O1 and O2 of route, one flag for
//             each (rank, segment).
// Why shifts  route orders a source's rows by (source of the domain, segment); the specification by
//             (segment, source), as a rank's number is segment x L + source.
#pragma once

#include "kernels/rail.cuh"

namespace ep {

constexpr int kRailPlanThreads = 512;

inline int64_t rail_exchange_shared_bytes(const EpContext& context) {
  return 4 * int64_t{context.shape.num_experts};
}
inline int64_t rail_counts_shared_bytes(const EpContext& context) {
  return 4 * (3 * int64_t{context.shape.num_experts} + 32);
}

// --- rail_exchange ---

struct ExchangeBlock {
  __device__ ExchangeBlock(const EpRailPlanArgs& plan_args, int block_channel, Watch* w)
      : args(plan_args), view(plan_args.context, plan_args.rail), watch(w), channel(block_channel) {
    const int64_t part = rail_part_tokens(args.rail, args.context.shape.num_channels);
    first = min_of(part * channel, args.rail.max_tokens);
    end = min_of(first + part, args.rail.max_tokens);
  }

  __device__ int64_t part_offset(int segment) const {
    const int64_t parity = static_cast<int64_t>(watch->epoch % 2);  // R6
    const int64_t row =
        (parity * args.rail.num_domains + segment) * args.context.shape.num_channels;
    return view.layout.topk + (row + channel) * view.layout.topk_part_bytes;
  }
  // Bytes of a part with tokens [first, min(end, num_tokens)).
  __device__ int64_t part_bytes(int64_t num_tokens) const {
    const int64_t tokens = max_of(0, min_of(end, num_tokens) - first);
    return align_up(static_cast<int64_t>(sizeof(RailTopkHeader)) + 2 * tokens * args.num_topk, 4);
  }

  const EpRailPlanArgs& args;
  RailView view;
  Watch* watch;
  int channel;
  int64_t first, end;  // tokens
};

// Writes the own part; ids outside [-1, E) are noted and count as dropped.
__device__ inline void pack_part(const ExchangeBlock& block, int* bad_slot) {
  const EpRailPlanArgs& args = block.args;
  char* part = block.view.local<char>(block.part_offset(block.view.me()));
  auto* words = reinterpret_cast<uint16_t*>(part + sizeof(RailTopkHeader));
  if (threadIdx.x == 0) {
    *bad_slot = INT32_MAX;
  }
  __syncthreads();
  const int64_t first = block.first * args.num_topk;
  const int64_t end = max_of(first, min_of(block.end, args.num_tokens) * args.num_topk);
  for (int64_t slot = first + threadIdx.x; slot < end; slot += blockDim.x) {
    const int64_t id = __ldg(args.topk_idx + slot);
    const bool valid = id >= 0 && id < args.context.shape.num_experts;
    if (!valid && id != -1) {
      atomicMin(bad_slot, static_cast<int>(slot));
    }
    words[slot - first] = valid ? static_cast<uint16_t>(id) : kRailNoExpert;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t bad = *bad_slot == INT32_MAX ? -1 : *bad_slot;
    const auto* control = block.view.local<RailControl>(block.view.layout.control);
    *reinterpret_cast<RailTopkHeader*>(part) = {static_cast<int32_t>(args.num_tokens),
                                                args.num_topk, args.alignment, bad,
                                                control->history};
  }
  __syncthreads();
}

// The first warp puts the own part to the rail and waits for those of the others.
template <class Net>
__device__ void exchange_parts(const ExchangeBlock& block, const Net& net) {
  const RailView& view = block.view;
  const int channel = rail_channel_topk(view.rail, block.channel);
  const int number = rail_signal_topk(view.layout, block.channel);
  const int64_t offset = block.part_offset(view.me());
  PutCounter<Net> puts(view, net, block.watch, channel);
  for (int domain = 0; domain < view.rail.num_domains; ++domain) {
    if (domain != view.me()) {
      net.put(domain, offset, offset, block.part_bytes(block.args.num_tokens), channel);
      puts.add();
      if (threadIdx.x == 0) {
        net.signal(domain, number, channel);
      }
      __syncwarp();
    }
  }
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < view.rail.num_domains && lane != view.me() &&
      !mutated(view.context, Mutation::kRailTopkSkipWait)) {
    wait_for_net(
        view.context, block.watch, [&] { return net.read_signal(lane, number, channel); },
        block.watch->epoch, view.waiting_for(lane, EP_PHASE_RAIL_TOPK, block.channel));
  }
  __syncwarp();
  puts.finish();
}

// Tokens of a segment; none where a token has another number of slots, which segment_word() refuses.
__device__ inline int64_t tokens_of(const ExchangeBlock& block, const RailTopkHeader* header) {
  return __ldcg(&header->num_topk) == block.args.num_topk ? __ldcg(&header->num_tokens) : 0;
}

// Turns a segment's part into virtual tokens, and counts its experts.
__device__ inline void expand_part(const ExchangeBlock& block, int segment, int32_t* histogram) {
  const EpRailPlanArgs& args = block.args;
  const int num_experts = args.context.shape.num_experts;
  const int num_topk = args.num_topk;
  const char* part = block.view.local<char>(block.part_offset(segment));
  const auto* header = reinterpret_cast<const RailTopkHeader*>(part);
  const auto* words = reinterpret_cast<const uint16_t*>(part + sizeof(RailTopkHeader));
  auto* to = block.view.local<int64_t>(block.view.layout.virtual_topk) +
             (segment * args.rail.max_tokens + block.first) * num_topk;
  const int64_t given = max_of(0, min_of(block.end, tokens_of(block, header)) - block.first);
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    histogram[expert] = 0;
  }
  __syncthreads();
  for (int64_t slot = threadIdx.x; slot < (block.end - block.first) * num_topk;
       slot += blockDim.x) {
    const int expert = slot < given * num_topk ? __ldcg(words + slot) : kRailNoExpert;
    const bool valid = expert < num_experts;
    if (valid) {
      atomicAdd(histogram + expert, 1);
    }
    const bool here =
        valid && __ldg(args.context.expert_rank + expert) < args.context.shape.ep_size;
    to[slot] = here ? expert : -1;
  }
  __syncthreads();
  int32_t* counts = block.view.local<int32_t>(block.view.layout.block_counts) +
                    (int64_t{block.channel} * args.rail.num_domains + segment) * num_experts;
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    counts[expert] = histogram[expert];
  }
  __syncthreads();
}

template <class Net>
__device__ void rail_exchange(const EpRailPlanArgs& args, int channel, int32_t* histogram,
                              Watch* watch) {
  __shared__ int bad_slot;
  const RailView view(args.context, args.rail);
  const Net net(args.context, args.rail);
  const int producers = args.context.shape.num_channels;
  const int blocks = producers + kWorkerBlocks<Net>;
  const bool works = begin_rail(view, kRailExchange, watch);
  if constexpr (Net::kNeedsWorker) {
    if (channel == producers) {
      net.work(producers, *watch);
      end_rail(view, kRailExchange, *watch, blocks);
      return;
    }
  }
  const ExchangeBlock block(args, channel, watch);
  if (works) {
    pack_part(block, &bad_slot);
    if (threadIdx.x < 32) {
      exchange_parts(block, net);
    }
  }
  __syncthreads();
  const bool here = works && !is_aborted(*watch);
  for (int segment = 0; here && segment < args.rail.num_domains; ++segment) {
    expand_part(block, segment, histogram);
  }
  tell_rails(view, net, *watch);
  if constexpr (Net::kNeedsWorker) {
    if (threadIdx.x == 0) {
      net.finish();
    }
  }
  end_rail(view, kRailExchange, *watch, blocks);
}

// --- rail_counts ---

struct CountsBlock {
  __device__ CountsBlock(const EpRailPlanArgs& plan_args, int block_channel, uint32_t* shared,
                         Watch* w)
      : args(plan_args), view(plan_args.context, plan_args.rail), watch(w), channel(block_channel) {
    num_experts = args.context.shape.num_experts;
    num_channels = args.context.shape.num_channels;
    local_ranks = args.context.shape.ep_size;
    num_domains = args.rail.num_domains;
    num_ranks = local_ranks * num_domains;
    my_rank = view.me() * local_ranks + args.context.ep_rank;
    row_base = shared;
    offset = shared + num_experts;
    own_index = reinterpret_cast<int32_t*>(shared + 2 * num_experts);
    warp_sums = shared + 3 * num_experts;
  }

  // Counts of rank `source` that lie at `peer` of this domain.
  __device__ int32_t* counts_at(int peer, int source) const {
    const int64_t row = static_cast<int64_t>(watch->epoch % 2) * num_ranks + source;
    return view.peers.at<int32_t>(peer, view.layout.counts) + row * (num_experts + EP_COUNTS_EXTRA);
  }
  __device__ int count(int source, int expert) const {
    return __ldcg(counts_at(args.context.ep_rank, source) + expert);
  }
  // The header of part `part` of a segment; rail_exchange of the same plan has received it.
  __device__ const RailTopkHeader* header(int segment, int part) const {
    const auto* control = view.local<RailControl>(view.layout.control);
    const int64_t parity = static_cast<int64_t>(control->epoch[kRailExchange] % 2);
    const int64_t row = (parity * num_domains + segment) * num_channels + part;
    return view.local<RailTopkHeader>(view.layout.topk + row * view.layout.topk_part_bytes);
  }

  const EpRailPlanArgs& args;
  RailView view;
  Watch* watch;
  uint32_t* row_base;  // [E] row of this rank's first copy for each expert
  uint32_t* offset;    // [E] rows before each place of expert_order, over all owners
  int32_t* own_index;  // [E] copies of this rank so far
  uint32_t* warp_sums;
  int channel, num_experts, num_channels, local_ranks, num_domains, num_ranks, my_rank;
};

// What follows the counts of a segment: its tokens, its alignment, and whether it is refused.
__device__ inline int segment_word(const CountsBlock& block, int segment, int word) {
  const RailTopkHeader* first = block.header(segment, 0);
  if (word == 0) {
    return first->num_tokens;
  }
  if (word == 1) {
    return first->alignment;
  }
  const EpRailPlanArgs& args = block.args;
  const uint32_t history = block.view.local<RailControl>(block.view.layout.control)->history;
  int bad = first->num_topk != args.num_topk || first->history != history ? 1 : 0;
  for (int part = 0; part < block.num_channels; ++part) {
    bad |= block.header(segment, part)->bad_slot >= 0 ? 1 : 0;
  }
  return bad;
}

// Pushes the counts of this block's segments to every peer of the domain.
__device__ inline void push_segments(const CountsBlock& block) {
  const EpContext& context = block.args.context;
  const auto* counts = block.view.local<int32_t>(block.view.layout.block_counts);
  for (int segment = block.channel; segment < block.num_domains; segment += block.num_channels) {
    const int source = segment * block.local_ranks + context.ep_rank;
    for (int word = threadIdx.x; word < block.num_experts + EP_COUNTS_EXTRA; word += blockDim.x) {
      int total = 0;
      if (word < block.num_experts) {
        for (int part = 0; part < block.num_channels; ++part) {
          total += counts[(int64_t{part} * block.num_domains + segment) * block.num_experts + word];
        }
      } else {
        total = segment_word(block, segment, word - block.num_experts);
      }
      for (int peer = 0; peer < block.local_ranks; ++peer) {
        block.counts_at(peer, source)[word] = total;
      }
    }
    __syncthreads();
    for (int peer = threadIdx.x; peer < block.local_ranks; peer += blockDim.x) {
      fence_sys();
      store_relaxed_sys(block.view.peers.at<uint64_t>(peer, block.view.layout.counts_flag) +
                            context.ep_rank * block.num_domains + segment,
                        block.watch->epoch);
    }
  }
}

__device__ inline bool wait_for_counts(const CountsBlock& block) {
  const EpContext& context = block.args.context;
  const auto* flags = block.view.local<uint64_t>(block.view.layout.counts_flag);
  bool here = true;
  for (int word = threadIdx.x; word < block.num_ranks && here; word += blockDim.x) {
    if (!mutated(context, Mutation::kRailCountsSkipWait)) {
      here = wait_until(context, block.watch, flags + word, block.watch->epoch,
                        {word / block.num_domains, EP_PHASE_RAIL_COUNTS, word % block.num_domains});
    }
  }
  return __syncthreads_and(here ? 1 : 0) != 0;
}

// Sum over the threads before this one, and of all in `total`. All threads call it.
__device__ inline uint32_t sum_below(uint32_t value, uint32_t* warp_sums, uint32_t* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
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
  *total = 0;
  for (int other = 0; other < kRailPlanThreads / 32; ++other) {
    before += other < warp ? warp_sums[other] : 0;
    *total += warp_sums[other];
  }
  return before + inclusive - value;
}

// Rows of this rank's first copies, over all owners; sums wrap at 2^32, differences are exact.
__device__ inline void find_rows(const CountsBlock& block) {
  const EpRail& rail = block.args.rail;
  const auto alignment = static_cast<uint32_t>(block.args.alignment);
  uint32_t carried = 0;
  for (int first = 0; first < block.num_experts; first += blockDim.x) {
    const int place = first + static_cast<int>(threadIdx.x);
    uint32_t all = 0;
    uint32_t below = 0;
    if (place < block.num_experts) {
      const int expert = __ldg(rail.expert_order + place);
      for (int source = 0; source < block.num_ranks; ++source) {
        const auto count = static_cast<uint32_t>(block.count(source, expert));
        below += source < block.my_rank ? count : 0;
        all += count;
      }
      block.row_base[expert] = below;
    }
    uint32_t sum = 0;
    const uint32_t before =
        sum_below((all + alignment - 1) / alignment * alignment, block.warp_sums, &sum);
    if (place < block.num_experts) {
      block.offset[place] = carried + before;
    }
    carried += sum;
  }
  __syncthreads();
  for (int place = threadIdx.x; place < block.num_experts; place += blockDim.x) {
    const int expert = __ldg(rail.expert_order + place);
    const int start = __ldg(rail.owner_first + __ldg(rail.expert_rank + expert));
    block.row_base[expert] += block.offset[place] - block.offset[start];
  }
  __syncthreads();
}

// How much later a segment's rows start than route, which orders by (source, segment), has them.
__device__ inline void write_shifts(const CountsBlock& block) {
  int32_t* shift = block.view.local<int32_t>(block.view.layout.shift);
  const int step = static_cast<int>(blockDim.x) * block.num_channels;
  for (int expert = block.channel * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
       expert < block.num_experts; expert += step) {
    int before = 0;
    for (int rank = 0; rank < block.num_ranks; ++rank) {
      const int local = rank % block.local_ranks;
      const int64_t at = int64_t{local} * block.num_domains + rank / block.local_ranks;
      shift[at * block.num_experts + expert] = before;
      before += block.count(rank, expert);
    }
    before = 0;
    for (int at = 0; at < block.num_ranks; ++at) {
      const int local = at / block.num_domains;
      const int segment = at % block.num_domains;
      shift[int64_t{at} * block.num_experts + expert] -= before;
      before += block.count(segment * block.local_ranks + local, expert);
    }
  }
}

__device__ inline void copy_all_counts(const CountsBlock& block) {
  const int total = block.num_ranks * block.num_experts;
  const int step = static_cast<int>(blockDim.x) * block.num_channels;
  for (int at = block.channel * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
       at < total; at += step) {
    block.args.counts[at] = block.count(at / block.num_experts, at % block.num_experts);
  }
}

// Who is to blame, and with what: for the mailbox of route.
__device__ inline void write_verdict(const CountsBlock& block) {
  int refused = -1;
  for (int source = block.num_ranks - 1; source >= 0; --source) {
    const bool differs = block.count(source, block.num_experts + 1) != block.args.alignment;
    refused = differs || block.count(source, block.num_experts + 2) != 0 ? source : refused;
  }
  int64_t bad = -1;
  for (int part = block.num_channels - 1; part >= 0; --part) {
    const int slot = block.header(block.view.me(), part)->bad_slot;
    bad = slot >= 0 ? slot : bad;
  }
  int64_t* verdict = block.view.local<int64_t>(block.view.layout.verdict);
  verdict[0] = refused;
  verdict[1] = bad < 0 ? -1 : bad / block.args.num_topk;
  verdict[2] = bad < 0 ? -1 : block.args.topk_idx[bad];
}

__device__ inline int own_expert(const CountsBlock& block, int64_t slot) {
  const int64_t id = __ldg(block.args.topk_idx + slot);
  return id >= 0 && id < block.num_experts ? static_cast<int>(id) : -1;
}

// Counts this rank's copies of each expert in slots [0, end). All threads call it.
__device__ inline void count_below(const CountsBlock& block, int64_t end) {
  for (int expert = threadIdx.x; expert < block.num_experts; expert += blockDim.x) {
    block.own_index[expert] = 0;
  }
  __syncthreads();
  for (int64_t slot = threadIdx.x; slot < end; slot += blockDim.x) {
    const int expert = own_expert(block, slot);
    if (expert >= 0) {
      atomicAdd(block.own_index + expert, 1);
    }
  }
  __syncthreads();
}

// Numbers this lane's copy among this rank's of the same expert. A whole warp calls; -1 has none.
__device__ inline int number_copy(const CountsBlock& block, int expert) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned same = __match_any_sync(~0u, expert);
  const int earlier = __popc(same & ((1u << lane) - 1));
  const int index = expert >= 0 ? block.own_index[expert] : 0;
  __syncwarp();
  if (expert >= 0 && earlier == 0) {
    block.own_index[expert] = index + __popc(same);
  }
  __syncwarp();
  return index + earlier;
}

// Gives this block's share of own slots their receivers and rows: one warp, 32 slots at a time.
__device__ inline void place_own(const CountsBlock& block) {
  const EpRailPlanArgs& args = block.args;
  const int64_t first = args.num_tokens * block.channel / block.num_channels * args.num_topk;
  const int64_t end = args.num_tokens * (block.channel + 1) / block.num_channels * args.num_topk;
  count_below(block, first);
  for (int64_t base = first; base < end && threadIdx.x < 32; base += 32) {
    const int64_t slot = base + static_cast<int64_t>(threadIdx.x);
    const int expert = slot < end ? own_expert(block, slot) : -1;
    const int copy = number_copy(block, expert);
    if (slot < end) {
      const int64_t row = expert >= 0 ? int64_t{block.row_base[expert]} + copy : -1;
      const bool kept = expert >= 0 && (args.capacity_rows < 0 || row < args.capacity_rows);
      args.dst_rank[slot] = kept ? __ldg(args.rail.expert_rank + expert) : -1;
      args.dst_row[slot] = kept ? static_cast<int32_t>(row) : -1;
    }
  }
}

template <class Net>
__device__ void rail_counts(const EpRailPlanArgs& args, int channel, uint32_t* shared,
                            Watch* watch) {
  const CountsBlock block(args, channel, shared, watch);
  const bool works = begin_rail(block.view, kRailCounts, watch);
  if (works) {
    push_segments(block);
  }
  if (works && wait_for_counts(block)) {
    find_rows(block);
    write_shifts(block);
    copy_all_counts(block);
    if (channel == 0 && threadIdx.x == 0) {
      write_verdict(block);
    }
    place_own(block);
  }
  tell_rails(block.view, Net(args.context, args.rail), *watch);
  end_rail(block.view, kRailCounts, *watch, block.num_channels);
}

}  // namespace ep
