// The C ABI of the rails: checks arguments, then launches. No exception leaves it.
#include "api/ep_rail.h"

#include <cstring>
#include <string>
#include <type_traits>

#include "api/checker.h"
#include "core/rail_launch.h"
#include "core/rail_layout.h"

namespace ep {
namespace {

// What the layout depends on.
void check_rail_shape(Checker* check, const EpContext& context, const EpRail& rail) {
  check_shape(check, context.shape);
  check->range("num_domains", rail.num_domains, 2, EP_MAX_DOMAINS);
  check->range("domain", rail.domain, 0, rail.num_domains - 1);
  check->range("num_blocks", rail.num_blocks, 1, EP_MAX_CHANNELS);
  check->range("num_blocks x 8", int64_t{rail.num_blocks} * EP_RAIL_WARPS, rail.num_domains - 1,
               INT32_MAX);
  check->range("net", rail.net, EP_NET_LOOP, EP_NET_GIN);
  check->range("rail.exact", rail.exact, 0, 1);
  if (!check->ok()) {
    return;  // neither a number to divide by nor one to count with
  }
  check->range("rail.max_tokens", rail.max_tokens, 1, kMaxTokens / rail.num_domains);
  check->range("context.shape.max_tokens", context.shape.max_tokens,
               rail.num_domains * rail.max_tokens, rail.num_domains * rail.max_tokens);
}

void check_rail(Checker* check, const EpContext& context, const EpRail& rail) {
  check_context(check, context);
  check_rail_shape(check, context, rail);
  if (!check->ok()) {
    return;  // neither a layout nor a number of domains
  }
  check->zero("rail.reserved", rail.reserved);
  check->zero("gin_reserved", rail.gin_reserved);
  const int64_t first_rank = int64_t{rail.domain} * context.shape.ep_size;
  check->range("first_rank (of the rail's domain)", context.first_rank, first_rank, first_rank);
  const EpRailLayout layout = make_rail_layout(context, rail);
  static_assert(std::has_unique_object_representations_v<EpRailLayout>);  // no padding
  if (std::memcmp(&rail.layout, &layout, sizeof(layout)) != 0) {
    check->fail("layout is not that of the rail; use ep_make_rail_layout");
  }
  check->pointer("rail.expert_rank", rail.expert_rank, true);
  check->pointer("rail.expert_order", rail.expert_order, true);
  check->pointer("rail.owner_first", rail.owner_first, true);
  check->pointer("chaos", rail.chaos, rail.net == EP_NET_CHAOS, kLongAlignment);
  for (int domain = 0; domain < rail.num_domains && rail.net != EP_NET_GIN; ++domain) {
    check->pointer("rail_base", rail.rail_base[domain], true, kRowAlignment);
  }
  check->pointer("gin_device_comm", rail.gin_device_comm, rail.net == EP_NET_GIN, kLongAlignment);
}

void check_tokens(Checker* check, const EpRail& rail, int64_t num_tokens, int num_topk,
                  int most_topk) {
  check->range("num_tokens", num_tokens, 0, rail.max_tokens);
  check->range("num_topk", num_topk, 1, most_topk);
}

void check_call(Checker* check, const EpRailPlanArgs& args) {
  check_rail(check, args.context, args.rail);
  check_tokens(check, args.rail, args.num_tokens, args.num_topk, args.context.shape.num_topk);
  const bool tokens = args.num_tokens > 0;
  check->pointer("topk_idx", args.topk_idx, tokens, kLongAlignment);
  check->pointer("dst_rank", args.dst_rank, tokens);
  check->pointer("dst_row", args.dst_row, tokens);
  check->pointer("counts", args.counts, true, kLongAlignment);
  check->alignment(args.alignment);
  check->range("capacity_rows", args.capacity_rows, -1, kMaxRows);
}

void check_rows(Checker* check, const EpContext& context, const void* x, int64_t num_tokens,
                int64_t row_bytes) {
  check->pointer("x", x, num_tokens > 0, kRowAlignment);
  check->range("row_bytes", row_bytes, 16, context.shape.partial_bytes);
  check->multiple("row_bytes", row_bytes, 16);
}

void check_call(Checker* check, const EpRailSendArgs& args) {
  check_rail(check, args.context, args.rail);
  check_tokens(check, args.rail, args.num_tokens, args.num_topk, args.context.shape.num_topk);
  check_rows(check, args.context, args.x, args.num_tokens, args.row_bytes);
  check->pointer("topk_idx", args.topk_idx, args.num_tokens > 0, kLongAlignment);
  check->pointer("topk_weights", args.topk_weights, false);
  check->zero("reserved", args.reserved);
}

void check_call(Checker* check, const EpRailDispatchArgs& args) {
  const EpDispatchArgs& domain = args.domain;
  check_rail(check, domain.context, args.rail);
  check_plan(check, domain.context, domain.plan);
  check_tokens(check, args.rail, args.num_tokens, domain.plan.num_topk,
               domain.context.shape.num_topk);
  check->range("plan.num_tokens", domain.plan.num_tokens, domain.context.shape.max_tokens,
               domain.context.shape.max_tokens);
  check_rows(check, domain.context, domain.x, args.num_tokens, domain.row_bytes);
  check->pointer("dst_rank", args.dst_rank, args.num_tokens > 0);
  check_outputs(check, domain, args.rail.layout.total_bytes);
  check->pointer("topk_weights", domain.topk_weights,
                 domain.recv_weights_offset >= 0 && args.num_tokens > 0);
  check->range("sent", args.sent, 0, 1);
  check->zero("reserved", args.reserved);
}

void check_call(Checker* check, const EpRailReturnArgs& args) {
  const EpCombineArgs& domain = args.domain;
  check_rail(check, domain.context, args.rail);
  check_plan(check, domain.context, domain.plan);
  check_tokens(check, args.rail, args.num_tokens, domain.plan.num_topk,
               domain.context.shape.num_topk);
  check->pointer("out", domain.out, args.num_tokens > 0, kRowAlignment);
  check->pointer("dst_rank", args.dst_rank, args.num_tokens > 0);
  check->range("dtype", domain.dtype, EP_BFLOAT16, EP_FLOAT32);
  check->range("exact", domain.exact, 0, 1);
  check->range("segment_tokens", domain.segment_tokens, args.rail.max_tokens, args.rail.max_tokens);
  check->range("home_segment", domain.home_segment, args.rail.domain, args.rail.domain);
  check->range("hidden", domain.hidden, 1, kMaxRowBytes / 4);
  if (!check->ok()) {
    return;  // the size below would overflow
  }
  const int element_bytes = domain.dtype == EP_FLOAT32 ? 4 : 2;
  check->multiple("hidden x element size", domain.hidden * element_bytes, kRowAlignment);
  check->range("bytes of a partial row", domain.hidden * (domain.exact != 0 ? 4 : element_bytes),
               16, domain.context.shape.partial_bytes);
  check_segments(check, domain);
}

const EpContext& context_of(const EpRailPlanArgs& args) {
  return args.context;
}
const EpContext& context_of(const EpRailSendArgs& args) {
  return args.context;
}
const EpContext& context_of(const EpRailDispatchArgs& args) {
  return args.domain.context;
}
const EpContext& context_of(const EpRailReturnArgs& args) {
  return args.domain.context;
}

// What decides the shape of a launch is equal for all ranks in it.
void check_alike(Checker* check, const EpRailPlanArgs& args, const EpRailPlanArgs& first) {
  check->equal("capacity_rows", args.capacity_rows, first.capacity_rows);
}

void check_alike(Checker* check, const EpRailSendArgs& args, const EpRailSendArgs& first) {
  check->equal("row_bytes", args.row_bytes, first.row_bytes);
}

void check_alike(Checker* check, const EpRailDispatchArgs& args, const EpRailDispatchArgs& first) {
  check->equal("row_bytes", args.domain.row_bytes, first.domain.row_bytes);
  check->equal("duplicate", args.domain.duplicate, first.domain.duplicate);
  check->equal("sent", args.sent, first.sent);
}

void check_alike(Checker* check, const EpRailReturnArgs& args, const EpRailReturnArgs& first) {
  check->equal("hidden", args.domain.hidden, first.domain.hidden);
  check->equal("dtype", args.domain.dtype, first.domain.dtype);
  check->equal("exact", args.domain.exact, first.domain.exact);
}

void check_rails_alike(Checker* check, const EpRail& rail, const EpRail& first) {
  check->equal("num_domains", rail.num_domains, first.num_domains);
  check->equal("num_blocks", rail.num_blocks, first.num_blocks);
  check->equal("net", rail.net, first.net);
  check->equal("rail.exact", rail.exact, first.exact);
  check->equal("rail.max_tokens", rail.max_tokens, first.max_tokens);
}

// Of a launch's ranks, each with all before it.
template <class Args>
void check_world(Checker* check, const Args* ranks, int num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    check_call(check, ranks[rank]);
    for (int earlier = 0; earlier < rank; ++earlier) {
      check_pair(check, context_of(ranks[rank]), context_of(ranks[earlier]));
    }
    check_rails_alike(check, ranks[rank].rail, ranks[0].rail);
    check_alike(check, ranks[rank], ranks[0]);
  }
}

template <class Args>
EpStatus run(const Args* ranks, int num_ranks, void* stream,
             cudaError_t (*launch)(const Args*, int, cudaStream_t),
             cudaError_t (*launch_gin)(const Args*, cudaStream_t)) {
  if (ranks == nullptr || num_ranks < 1 || num_ranks > EP_WORLD_RANKS) {
    return refuse("num_ranks is " + std::to_string(num_ranks) + "; one launch takes 1 to " +
                  std::to_string(EP_WORLD_RANKS));
  }
  Checker check;
  check_world(&check, ranks, num_ranks);
  if (check.status() != EP_OK) {
    return EP_INVALID_ARGUMENT;
  }
  const auto on = static_cast<cudaStream_t>(stream);
  if (ranks[0].rail.net != EP_NET_GIN) {
    return note_launch(launch(ranks, num_ranks, on));
  }
  if (num_ranks != 1 || launch_gin == nullptr) {
    return refuse("net is EP_NET_GIN; it takes one rank a launch and a library built with NCCL");
  }
  return note_launch(launch_gin(ranks, on));
}

// 0 for NULL, as for the other sizes.
int64_t chaos_bytes_of(const EpRail* rail) {
  constexpr int64_t kControl = 64;
  constexpr int64_t kRing = 2048;  // at least those of ChaosControl and ChaosRing
  return rail == nullptr ? 0 : kControl + kRing * rail->layout.channels;
}

}  // namespace
}  // namespace ep

extern "C" {

EpStatus ep_make_rail_layout(const EpContext* context, const EpRail* rail, EpRailLayout* layout) {
  if (context == nullptr || rail == nullptr || layout == nullptr) {
    return ep::refuse("context, rail or layout is NULL");
  }
  ep::Checker check;
  ep::check_rail_shape(&check, *context, *rail);
  if (check.status() == EP_OK) {
    *layout = ep::make_rail_layout(*context, *rail);
  }
  return check.status();
}

int64_t ep_chaos_bytes(const EpRail* rail) {
  return ep::chaos_bytes_of(rail);
}

EpStatus ep_rail_exchange(const EpRailPlanArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_rail_exchange, &ep::launch_rail_exchange_gin);
}

EpStatus ep_rail_counts(const EpRailPlanArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_rail_counts, &ep::launch_rail_counts_gin);
}

EpStatus ep_rail_send(const EpRailSendArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_rail_send, &ep::launch_rail_send_gin);
}

EpStatus ep_rail_dispatch(const EpRailDispatchArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_rail_dispatch, &ep::launch_rail_dispatch_gin);
}

EpStatus ep_rail_return(const EpRailReturnArgs* args, void* stream) {
  return ep::run(args, 1, stream, &ep::launch_rail_return, &ep::launch_rail_return_gin);
}

EpStatus ep_rail_exchange_world(const EpRailPlanArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_rail_exchange,
                 &ep::launch_rail_exchange_gin);
}

EpStatus ep_rail_counts_world(const EpRailPlanArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_rail_counts, &ep::launch_rail_counts_gin);
}

EpStatus ep_rail_send_world(const EpRailSendArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_rail_send, &ep::launch_rail_send_gin);
}

EpStatus ep_rail_dispatch_world(const EpRailDispatchArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_rail_dispatch,
                 &ep::launch_rail_dispatch_gin);
}

EpStatus ep_rail_return_world(const EpRailReturnArgs* ranks, int32_t num_ranks, void* stream) {
  return ep::run(ranks, num_ranks, stream, &ep::launch_rail_return, &ep::launch_rail_return_gin);
}

}  // extern "C"
