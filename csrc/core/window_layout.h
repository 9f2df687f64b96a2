// Where everything lies in a rank's window: the only place that computes offsets.
#ifndef EP_CORE_WINDOW_LAYOUT_H_
#define EP_CORE_WINDOW_LAYOUT_H_

#include "core/args.h"

namespace ep {

constexpr int64_t kRegionAlignment = 128;  // no two regions share a cache line
constexpr int64_t kWindowAlignment = 4096;

// Bytes of one slot of the partial ring: the row, then one float per slot for the weights' gradient.
EP_HOST_DEVICE constexpr int64_t partial_slot_bytes(const EpWindowShape& shape) {
  return align_up(align_up(shape.partial_bytes, 16) + 4 * int64_t{shape.num_topk},
                  kRegionAlignment);
}

// Gives each region its offset; sizes in the order of EpWindowLayout.
constexpr EpWindowLayout make_window_layout(const EpWindowShape& shape) {
  const int64_t ranks = shape.ep_size;
  const int64_t channels = shape.num_channels;
  const int64_t slots = channels * ranks * shape.ring_depth;
  const int64_t counts_row = shape.num_experts + ranks + EP_COUNTS_EXTRA;
  EpWindowLayout layout{};
  int64_t end = 0;
  const auto place = [&end](int64_t bytes) {
    const int64_t offset = end;
    end = align_up(end + bytes, kRegionAlignment);
    return offset;
  };
  layout.error = place(8);
  layout.local = place(sizeof(LocalControl));
  layout.route_flag = place(8 * ranks * channels);
  layout.dispatch_ready = place(static_cast<int64_t>(sizeof(EpReady)) * ranks);
  layout.rows_done = place(8 * ranks * channels * EP_SEND_WARPS);
  layout.combine_ready = place(8 * ranks);
  layout.gather_ready = place(static_cast<int64_t>(sizeof(EpReady)) * ranks);
  layout.gather_done = place(8 * ranks * channels);
  layout.partial_full = place(8 * slots);
  layout.partial_free = place(8 * slots);
  layout.block_counts = place(4 * channels * (shape.num_experts + ranks));
  layout.counts = place(4 * 2 * ranks * counts_row);
  layout.record_header = place(4 * 2 * ranks * shape.max_tokens);
  layout.record_entry = place(4 * 2 * ranks * shape.max_tokens * shape.num_topk);
  layout.slot_bytes = partial_slot_bytes(shape);
  layout.partials = place(slots * layout.slot_bytes);
  layout.total_bytes = align_up(end, kWindowAlignment);
  return layout;
}

// Records that a rank can receive: at most one for each token of each source.
EP_HOST_DEVICE constexpr int64_t max_records(const EpWindowShape& shape) {
  return int64_t{shape.ep_size} * shape.max_tokens;
}

// Entries of one source's row of chunk_first: its chunks and the end.
EP_HOST_DEVICE constexpr int64_t chunk_stride(const EpWindowShape& shape) {
  return ceil_div(shape.max_tokens, kChunkTokens) + 1;
}

}  // namespace ep

#endif  // EP_CORE_WINDOW_LAYOUT_H_
