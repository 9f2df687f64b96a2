// The C ABI: checks arguments, then launches. No exception leaves it.
#include "api/ep_dispatcher.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <type_traits>

#include "api/checker.h"
#include "core/launch.h"
#include "core/window_layout.h"

namespace ep {
namespace {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace

EpStatus refuse(const std::string& message) {
  last_error() = message;
  return EP_INVALID_ARGUMENT;
}

EpStatus note_launch(cudaError_t result) {
  if (result != cudaSuccess) {
    last_error() = std::string("the launch failed: ") + cudaGetErrorString(result);
    return EP_LAUNCH_FAILED;
  }
  return EP_OK;
}

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 46;  // of a window and what lies behind it
constexpr uint64_t kMaxTimeoutNs = INT64_MAX;
constexpr int kEntryBits = 32;
constexpr int kFirstRankEnd = 65535;  // a rank and one more travel in 16 bits of an error word

}  // namespace

void check_shape(Checker* check, const EpWindowShape& shape) {
  check->range("ep_size", shape.ep_size, 1, EP_MAX_RANKS);
  check->range("num_experts", shape.num_experts, shape.ep_size, EP_MAX_EXPERTS);
  check->range("num_topk", shape.num_topk, 1, EP_MAX_TOPK);
  check->range("num_channels", shape.num_channels, 1, EP_MAX_CHANNELS);
  check->range("ring_depth", shape.ring_depth, 1, 1024);
  check->range("max_tokens", shape.max_tokens, 0, kMaxTokens);
  check->range("partial_bytes", shape.partial_bytes, 0, kMaxRowBytes);
  check->zero("shape.reserved", shape.reserved);
  if (!check->ok()) {
    return;  // the sizes below would overflow
  }
  const int index_bits = bits_for(shape.max_tokens * shape.num_topk + 1);
  if (index_bits + bits_for(shape.num_experts) > kEntryBits) {
    check->fail("max_tokens x num_topk is " + std::to_string(shape.max_tokens * shape.num_topk) +
                " for " + std::to_string(shape.num_experts) +
                " experts; an expert and an index must fit into 32 bits: use fewer tokens a call");
  }
}

void check_context(Checker* check, const EpContext& context) {
  check_shape(check, context.shape);
  check->range("ep_rank", context.ep_rank, 0, context.shape.ep_size - 1);
  check->range("num_local_experts", context.num_local_experts, 1, context.shape.num_experts);
  check->range("num_local_experts x ep_size",
               int64_t{context.num_local_experts} * context.shape.ep_size, 1, kMaxBaseEntries);
  if (!check->ok()) {
    return;  // neither a layout nor a number of windows
  }
  check->range("first_rank", context.first_rank, 0, kFirstRankEnd - context.shape.ep_size);
  check->zero("context.reserved", context.reserved);
  const EpWindowLayout layout = make_window_layout(context.shape);
  static_assert(std::has_unique_object_representations_v<EpWindowLayout>);  // no padding
  if (std::memcmp(&context.window, &layout, sizeof(layout)) != 0) {
    check->fail("window is not the layout of shape; use ep_make_window_layout");
  }
  if (context.timeout_ns == 0 || context.timeout_ns > kMaxTimeoutNs) {
    check->fail("timeout_ns is " + std::to_string(context.timeout_ns) + "; it must be in [1, " +
                std::to_string(kMaxTimeoutNs) + "]");
  }
  for (int rank = 0; rank < context.shape.ep_size; ++rank) {
    check->pointer("window_base", context.window_base[rank], true, kRowAlignment);
  }
  check->pointer("expert_rank", context.expert_rank, true);
  check->pointer("expert_local", context.expert_local, true);
  check->pointer("expert_order", context.expert_order, true);
  check->pointer("owner_first", context.owner_first, true);
  check->pointer("fault", context.fault, true, kLongAlignment);
}

void check_plan(Checker* check, const EpContext& context, const EpPlan& plan) {
  check->range("num_tokens", plan.num_tokens, 0, context.shape.max_tokens);
  check->range("plan.num_topk", plan.num_topk, 1, context.shape.num_topk);
  check->zero("plan.reserved", plan.reserved);
  const bool tokens = plan.num_tokens > 0;
  check->pointer("plan.dst_rank", plan.dst_rank, tokens);
  check->pointer("plan.dst_row", plan.dst_row, tokens);
  check->pointer("plan.contributor", plan.contributor, tokens, kLongAlignment);
  check->pointer("plan.counts", plan.counts, true, kLongAlignment);
  check->pointer("plan.tokens_per_expert", plan.tokens_per_expert, true, kLongAlignment);
  check->pointer("plan.padded_tokens_per_expert", plan.padded_tokens_per_expert, true,
                 kLongAlignment);
  check->pointer("plan.expert_offsets", plan.expert_offsets, true, kLongAlignment);
  check->pointer("plan.totals", plan.totals, true, kLongAlignment);
  check->pointer("plan.record_header", plan.record_header, context.shape.max_tokens > 0);
  check->pointer("plan.record_row", plan.record_row, context.shape.max_tokens > 0);
  check->pointer("plan.chunk_first", plan.chunk_first, true);
  check->pointer("plan.source_tokens", plan.source_tokens, true);
}

void check_outputs(Checker* check, const EpDispatchArgs& args, int64_t control_bytes) {
  check->range("recv_rows", args.recv_rows, 0, kMaxRows);
  const int64_t first = args.recv_rows > 0 ? control_bytes : 0;
  check->multiple("recv_x_offset", args.recv_x_offset, kRowAlignment);
  check->range("recv_x_offset", args.recv_x_offset, first, kMaxBytes);
  if (args.recv_weights_offset != -1) {
    check->multiple("recv_weights_offset", args.recv_weights_offset, 4);
    check->range("recv_weights_offset (-1 for none)", args.recv_weights_offset, first, kMaxBytes);
  }
  check->range("duplicate", args.duplicate, 0, 1);
  check->zero("reserved", args.reserved);
}

void check_pair(Checker* check, const EpContext& context, const EpContext& earlier) {
  const EpWindowShape& shape = context.shape;
  check->equal("ep_size", shape.ep_size, earlier.shape.ep_size);
  check->equal("num_experts", shape.num_experts, earlier.shape.num_experts);
  check->equal("shape.num_topk", shape.num_topk, earlier.shape.num_topk);
  check->equal("num_channels", shape.num_channels, earlier.shape.num_channels);
  check->equal("ring_depth", shape.ring_depth, earlier.shape.ring_depth);
  check->equal("max_tokens", shape.max_tokens, earlier.shape.max_tokens);
  check->equal("partial_bytes", shape.partial_bytes, earlier.shape.partial_bytes);
  const int64_t rank = int64_t{context.first_rank} + context.ep_rank;
  if (rank == int64_t{earlier.first_rank} + earlier.ep_rank) {
    check->fail("first_rank + ep_rank is " + std::to_string(rank) +
                " on two ranks of a launch; give each of its ranks its own context");
  }
}

namespace {

void check_call(Checker* check, const EpRouteArgs& args) {
  check_context(check, args.context);
  check_plan(check, args.context, args.plan);
  check->pointer("topk_idx", args.topk_idx, args.plan.num_tokens > 0, kLongAlignment);
  check->alignment(args.alignment);
  check->range("capacity_rows", args.capacity_rows, -1, kMaxRows);
  check->range("only_refusals", args.only_refusals, 0, 1);
  check->pointer("mailbox", args.mailbox, false, kLongAlignment);
  if (args.mailbox != nullptr && args.ticket == 0) {
    check->fail("ticket is 0, which is what an empty mailbox holds; give each call its own");
  }
  check->pointer("segment_shift", args.segment_shift, false);
  check->pointer("verdict", args.verdict, false, kLongAlignment);
  if (args.segment_shift == nullptr) {
    check->zero("segment_tokens (without segment_shift)", args.segment_tokens);
  } else if (args.segment_tokens < 1 || args.context.shape.max_tokens % args.segment_tokens != 0) {
    check->fail("segment_tokens is " + std::to_string(args.segment_tokens) +
                "; it must divide max_tokens, " + std::to_string(args.context.shape.max_tokens));
  }
}

void check_call(Checker* check, const EpDispatchArgs& args) {
  check_context(check, args.context);
  check_plan(check, args.context, args.plan);
  check->pointer("x", args.x, args.plan.num_tokens > 0, kRowAlignment);
  check->range("row_bytes", args.row_bytes, 16, kMaxRowBytes);
  check->multiple("row_bytes", args.row_bytes, 16);
  check_outputs(check, args, args.context.window.total_bytes);
  check->pointer("topk_weights", args.topk_weights,
                 args.recv_weights_offset >= 0 && args.plan.num_tokens > 0);
}

// Of rows in the own window that peers read. How many there are only the device knows: a rank
// without rows may name any place, and 0 is the one that needs no heap.
void check_rows_at(Checker* check, const EpContext& context, const char* name, int64_t offset,
                   int64_t alignment) {
  if (offset != 0) {
    check->multiple(name, offset, alignment);
    check->range((std::string(name) + " (0 without rows)").c_str(), offset,
                 context.window.total_bytes, kMaxBytes);
  }
}

void check_gather(Checker* check, const EpCombineArgs& args) {
  check_rows_at(check, args.context, "expert_out_offset", args.expert_out_offset, kRowAlignment);
  if (args.row_weights_grad_offset != -1) {
    check_rows_at(check, args.context, "row_weights_grad_offset", args.row_weights_grad_offset, 4);
    check->pointer("weights_grad", args.weights_grad, args.plan.num_tokens > 0);
  } else if (args.weights_grad != nullptr) {
    check->fail("row_weights_grad_offset is -1 but weights_grad is not NULL; give both or none");
  }
}

}  // namespace

void check_segments(Checker* check, const EpCombineArgs& args) {
  const int element_bytes = args.dtype == EP_FLOAT32 ? 4 : 2;
  const int64_t tokens = args.plan.num_tokens;
  check->range("segment_tokens", args.segment_tokens, 0, args.context.shape.max_tokens);
  if (args.segment_tokens <= 0) {
    check->zero("home_segment", args.home_segment);
    check->zero("segment_stride", args.segment_stride);
    check->null("segment_out", args.segment_out);
    check->null("own_out", args.own_out);
    return;
  }
  if (args.form != EP_COMBINE_PUSH) {
    check->fail("form is EP_COMBINE_GATHER with segment_tokens; it must be EP_COMBINE_PUSH");
  }
  check->range("plan.num_tokens (with segment_tokens)", tokens, args.segment_tokens, kMaxTokens);
  check->multiple("plan.num_tokens (with segment_tokens)", tokens, args.segment_tokens);
  const int64_t segments = tokens / args.segment_tokens;
  check->range("home_segment", args.home_segment, 0, segments > 1 ? segments - 1 : 0);
  const bool wide = args.exact != 0 && args.dtype != EP_FLOAT32;
  const int64_t grad_bytes = args.weights_grad == nullptr ? 0 : 4 * int64_t{args.plan.num_topk};
  const int64_t sum_bytes = args.hidden * (wide ? 4 : element_bytes);
  if (segments > 1) {
    check->range("segment_stride", args.segment_stride, sum_bytes + grad_bytes, kMaxBytes);
  }
  check->multiple("segment_stride", args.segment_stride, kRowAlignment);
  check->pointer("segment_out", args.segment_out, segments > 1, kRowAlignment);
  if (wide) {
    check->pointer("own_out", args.own_out, true, kRowAlignment);
  } else {
    check->null("own_out", args.own_out);
  }
}

namespace {

void check_call(Checker* check, const EpCombineArgs& args) {
  check_context(check, args.context);
  check_plan(check, args.context, args.plan);
  check->pointer("expert_out", args.expert_out, false, kRowAlignment);
  check->pointer("out", args.out, args.plan.num_tokens > 0, kRowAlignment);
  check->range("form", args.form, EP_COMBINE_PUSH, EP_COMBINE_GATHER);
  if (args.form == EP_COMBINE_GATHER) {
    check_gather(check, args);
  }
  check->range("dtype", args.dtype, EP_BFLOAT16, EP_FLOAT32);
  check->range("exact", args.exact, 0, 1);
  check->zero("reserved", args.reserved);
  const int element_bytes = args.dtype == EP_FLOAT32 ? 4 : 2;
  check->range("hidden", args.hidden, 1, kMaxRowBytes / 4);
  check->pointer("row_weights_grad", args.row_weights_grad, false);
  check->pointer("weights_grad", args.weights_grad, false);
  if (!check->ok()) {
    return;  // the sizes below would overflow
  }
  check->multiple("hidden x element size", args.hidden * element_bytes, 16);
  check->range("bytes of a partial row", args.hidden * (args.exact != 0 ? 4 : element_bytes), 16,
               args.context.shape.partial_bytes);
  if (args.row_weights_grad != nullptr) {
    check->pointer("weights_grad", args.weights_grad, args.plan.num_tokens > 0);
  }
  check_segments(check, args);
}

// What decides the shape of a launch is equal for all ranks in it.
void check_alike(Checker* check, const EpRouteArgs& args, const EpRouteArgs& first) {
  check->equal("capacity_rows", args.capacity_rows, first.capacity_rows);
}

void check_alike(Checker* check, const EpDispatchArgs& args, const EpDispatchArgs& first) {
  check->equal("row_bytes", args.row_bytes, first.row_bytes);
  check->equal("duplicate", args.duplicate, first.duplicate);
}

void check_alike(Checker* check, const EpCombineArgs& args, const EpCombineArgs& first) {
  check->equal("hidden", args.hidden, first.hidden);
  check->equal("dtype", args.dtype, first.dtype);
  check->equal("exact", args.exact, first.exact);
  check->equal("form", args.form, first.form);
  check->equal("segment_tokens", args.segment_tokens, first.segment_tokens);
}

template <class Args>
EpStatus run(const Args* ranks, int num_ranks, void* stream,
             cudaError_t (*launch)(const Args*, int, cudaStream_t)) {
  if (num_ranks < 1 || num_ranks > EP_WORLD_RANKS) {
    return refuse("num_ranks is " + std::to_string(num_ranks) + "; one launch takes 1 to " +
                  std::to_string(EP_WORLD_RANKS));
  }
  if (ranks == nullptr) {
    return refuse("the arguments are NULL");
  }
  Checker check;
  for (int rank = 0; rank < num_ranks; ++rank) {
    check_call(&check, ranks[rank]);
    for (int earlier = 0; earlier < rank; ++earlier) {
      check_pair(&check, ranks[rank].context, ranks[earlier].context);
    }
    check_alike(&check, ranks[rank], ranks[0]);
  }
  if (check.status() != EP_OK) {
    return EP_INVALID_ARGUMENT;
  }
  return note_launch(launch(ranks, num_ranks, static_cast<cudaStream_t>(stream)));
}

bool is_shape(const EpWindowShape* shape) {
  Checker check;
  if (shape != nullptr) {
    check_shape(&check, *shape);
  }
  return shape != nullptr && check.ok();
}

// Combine in the form that the first rank names; all name the same.
EpStatus run_combine(const EpCombineArgs* ranks, int num_ranks, void* stream) {
  const bool gather = ranks != nullptr && ranks[0].form == EP_COMBINE_GATHER;
  return run(ranks, num_ranks, stream, gather ? &launch_gather : &launch_combine);
}

}  // namespace
}  // namespace ep

extern "C" {

const char* ep_last_error(void) {
  return ep::last_error().c_str();
}

EpStatus ep_make_window_layout(const EpWindowShape* shape, EpWindowLayout* layout) {
  if (shape == nullptr || layout == nullptr) {
    return ep::refuse("shape or layout is NULL");
  }
  ep::Checker check;
  ep::check_shape(&check, *shape);
  if (check.status() == EP_OK) {
    *layout = ep::make_window_layout(*shape);
  }
  return check.status();
}

int64_t ep_max_records(const EpWindowShape* shape) {
  return ep::is_shape(shape) ? ep::max_records(*shape) : 0;
}

int64_t ep_chunk_stride(const EpWindowShape* shape) {
  return ep::is_shape(shape) ? ep::chunk_stride(*shape) : 0;
}

EpStatus ep_route(const EpRouteArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_route);
}

EpStatus ep_dispatch(const EpDispatchArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_dispatch);
}

EpStatus ep_combine(const EpCombineArgs* args, void* stream) {
  return ep::run_combine(args, 1, stream);
}

EpStatus ep_route_world(const EpRouteArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_route);
}

EpStatus ep_dispatch_world(const EpDispatchArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_dispatch);
}

EpStatus ep_combine_world(const EpCombineArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run_combine(ranks, num_ranks, stream);
}

}  // extern "C"
