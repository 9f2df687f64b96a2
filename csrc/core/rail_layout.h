// Where the rails' regions lie in a rank's window, behind those of its domain.
#ifndef EP_CORE_RAIL_LAYOUT_H_
#define EP_CORE_RAIL_LAYOUT_H_

#include "api/ep_rail.h"
#include "core/window_layout.h"

namespace ep {

enum RailKernelId { kRailExchange = 0, kRailCounts = 1, kRailReturn = 2, kRailSend = 3 };

// Epochs of the rails' own kernels; zero at first. That of kRailSend counts dispatches whose records
// were posted, by whichever launch.
struct RailControl {
  uint64_t epoch[4];
  uint32_t exits[4];
  uint32_t told;     // 1 once this rank has passed a fault on
  uint32_t history;  // of the calls so far that travelled with weights, and without: see note_call
};

// In front of each part of a segment's routing.
struct RailTopkHeader {
  int32_t num_tokens, num_topk, alignment;
  int32_t bad_slot;  // the part's lowest slot with a bad id, of the whole routing; -1 for none
  uint32_t history;  // RailControl.history of the sender
};

// What a block's role spent, in test builds: for the benches. Cycles of each warp's waits, of making
// records and of putting are added up over its warps.
enum RoleWord {
  kRoleBeginNs = 0,
  kRoleEndNs = 1,
  kRoleCycles = 2,
  kRoleWaits = 3,
  kRoleFills = 4,
  kRolePuts = 5,
  kRoleMostUnsent = 6,  // puts of one warp that were on their way at once
  kRoleWords = 8
};
enum RoleKernel { kRolesOfDispatch = 0, kRolesOfReturn = 1 };

constexpr uint16_t kRailNoExpert = 0xffff;

// Channels towards each other domain: every putting warp serves one domain only, so that a domain
// that does not come delays nobody else's tokens.
EP_HOST_DEVICE constexpr int32_t rail_lanes(int32_t num_domains, int32_t num_blocks) {
  return num_domains < 2
             ? 1
             : static_cast<int32_t>(max_of(1, num_blocks * EP_RAIL_WARPS / (num_domains - 1)));
}

// Tokens of a part: block b of the exchange carries tokens [b n, (b + 1) n).
EP_HOST_DEVICE constexpr int64_t rail_part_tokens(const EpRail& rail, int num_channels) {
  return ceil_div(rail.max_tokens, num_channels);
}

EP_HOST_DEVICE constexpr int64_t rail_slot_bytes(const EpWindowShape& shape) {
  return partial_slot_bytes(shape);
}

constexpr EpRailLayout make_rail_layout(const EpContext& context, const EpRail& rail) {
  const EpWindowShape& shape = context.shape;
  const int64_t domains = rail.num_domains;
  const int64_t ranks = domains * shape.ep_size;
  const int64_t channels = shape.num_channels;
  EpRailLayout layout{};
  layout.lanes = rail_lanes(rail.num_domains, rail.num_blocks);
  layout.signals_per_domain = 2 * layout.lanes + 2 + shape.num_channels;
  layout.channels = layout.lanes * rail.num_domains + shape.num_channels + 1;
  layout.slot_bytes = rail_slot_bytes(shape);
  layout.topk_part_bytes =
      align_up(static_cast<int64_t>(sizeof(RailTopkHeader)) +
                   2 * rail_part_tokens(rail, shape.num_channels) * shape.num_topk,
               16);
  int64_t end = context.window.total_bytes;
  const auto place = [&end](int64_t bytes) {
    const int64_t offset = end;
    end = align_up(end + bytes, kRegionAlignment);
    return offset;
  };
  layout.signals = place(8 * domains * layout.signals_per_domain);
  layout.control = place(static_cast<int64_t>(sizeof(RailControl)));
  layout.posted = place(8 * int64_t{layout.channels});
  layout.stats = place(8 * domains * 2);
  layout.role_times = place(8 * kRoleWords * 2 * (channels + rail.num_blocks));
  layout.counts_flag = place(8 * ranks);
  layout.counts = place(4 * 2 * ranks * (shape.num_experts + EP_COUNTS_EXTRA));
  layout.block_counts = place(4 * channels * domains * shape.num_experts);
  layout.topk = place(2 * domains * channels * layout.topk_part_bytes);
  layout.shift = place(4 * ranks * shape.num_experts);
  layout.verdict = place(8 * 4);
  layout.virtual_topk = place(8 * domains * rail.max_tokens * shape.num_topk);
  layout.staging =
      place(int64_t{rail.num_blocks} * EP_RAIL_WARPS * EP_RAIL_STAGES * layout.slot_bytes);
  layout.landing = place((domains - 1) * rail.max_tokens * layout.slot_bytes);
  layout.partials = place((domains - 1) * rail.max_tokens * layout.slot_bytes);
  layout.own = place(rail.exact != 0 ? rail.max_tokens * shape.partial_bytes : 0);
  layout.total_bytes = align_up(end, kWindowAlignment);
  return layout;
}

// Signals that one domain raises here: numbers below.
EP_HOST_DEVICE constexpr int rail_signal_rows(int lane) {
  return lane;
}
EP_HOST_DEVICE constexpr int rail_signal_sums(const EpRailLayout& layout, int lane) {
  return layout.lanes + lane;
}
EP_HOST_DEVICE constexpr int rail_signal_dispatch_entry(const EpRailLayout& layout) {
  return 2 * layout.lanes;
}
EP_HOST_DEVICE constexpr int rail_signal_return_entry(const EpRailLayout& layout) {
  return 2 * layout.lanes + 1;
}
EP_HOST_DEVICE constexpr int rail_signal_topk(const EpRailLayout& layout, int block) {
  return 2 * layout.lanes + 2 + block;
}

// Channels of the net; a channel is posted to by one warp.
EP_HOST_DEVICE constexpr int rail_channel(const EpRail& rail, int lane, int to_domain) {
  return lane * rail.num_domains + to_domain;
}
EP_HOST_DEVICE constexpr int rail_channel_topk(const EpRail& rail, int block) {
  return rail.layout.lanes * rail.num_domains + block;
}
EP_HOST_DEVICE constexpr int rail_channel_entry(const EpRail& rail) {
  return rail.layout.channels - 1;
}

// Place of another domain's area among the D - 1 of domain `me`.
EP_HOST_DEVICE constexpr int rail_area(int me, int other) {
  return other < me ? other : other - 1;
}

}  // namespace ep

#endif  // EP_CORE_RAIL_LAYOUT_H_
