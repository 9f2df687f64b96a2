// Python over the C ABI: its structs as classes with writable fields, pointers and streams as
// integers, the calls as functions that let other Python threads run.
#include "bindings/kernels.h"

#include <pybind11/stl.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "api/ep_dispatcher.h"
#include "core/args.h"

namespace py = pybind11;

namespace ep {
namespace {

void bind_window(py::module_& module) {
  py::class_<EpWindowShape>(module, "WindowShape", py::module_local())
      .def(py::init([](int ep_size, int num_experts, int num_topk, int num_channels, int ring_depth,
                       int64_t max_tokens, int64_t partial_bytes) {
             return EpWindowShape{ep_size,    num_experts, num_topk,   num_channels,
                                  ring_depth, 0,           max_tokens, partial_bytes};
           }),
           py::kw_only(), py::arg("ep_size"), py::arg("num_experts"), py::arg("num_topk"),
           py::arg("num_channels"), py::arg("ring_depth"), py::arg("max_tokens"),
           py::arg("partial_bytes"))
      .def_readonly("ep_size", &EpWindowShape::ep_size)
      .def_readonly("num_experts", &EpWindowShape::num_experts)
      .def_readonly("num_topk", &EpWindowShape::num_topk)
      .def_readonly("num_channels", &EpWindowShape::num_channels)
      .def_readonly("ring_depth", &EpWindowShape::ring_depth)
      .def_readonly("max_tokens", &EpWindowShape::max_tokens)
      .def_readonly("partial_bytes", &EpWindowShape::partial_bytes);
  py::class_<EpWindowLayout>(module, "WindowLayout", py::module_local())
      .def(py::init([](const EpWindowShape& shape) {
        EpWindowLayout layout;
        check(ep_make_window_layout(&shape, &layout));
        return layout;
      }))
      .def_readonly("error", &EpWindowLayout::error)
      .def_readonly("local", &EpWindowLayout::local)
      .def_readonly("partials", &EpWindowLayout::partials)
      .def_readonly("slot_bytes", &EpWindowLayout::slot_bytes)
      .def_readonly("total_bytes", &EpWindowLayout::total_bytes);
  module.attr("MAX_BASE_ENTRIES") = kMaxBaseEntries;
  module.def("max_records", [](const EpWindowShape& shape) { return ep_max_records(&shape); });
  module.def("chunk_stride", [](const EpWindowShape& shape) { return ep_chunk_stride(&shape); });
}

void bind_context(py::module_& module) {
  py::class_<EpContext> type(module, "Context", py::module_local());
  type.def(py::init([](const EpWindowShape& shape, int ep_rank) {
             EpContext context{};
             context.shape = shape;
             context.ep_rank = ep_rank;
             check(ep_make_window_layout(&shape, &context.window));
             return context;
           }),
           py::arg("shape"), py::arg("ep_rank"))
      .def_readonly("shape", &EpContext::shape)
      .def_readwrite("window", &EpContext::window)
      .def_readwrite("reserved", &EpContext::reserved)
      .def_readonly("ep_rank", &EpContext::ep_rank)
      .def_readwrite("num_local_experts", &EpContext::num_local_experts)
      .def_readwrite("timeout_ns", &EpContext::timeout_ns)
      .def_readwrite("test_mutation", &EpContext::test_mutation)
      .def_readwrite("test_delay_us", &EpContext::test_delay_us)
      .def_readwrite("first_rank", &EpContext::first_rank)
      .def_property(
          "window_bases",
          [](const EpContext& self) {
            std::vector<uintptr_t> bases;
            for (int rank = 0; rank < self.shape.ep_size; ++rank) {
              bases.push_back(reinterpret_cast<uintptr_t>(self.window_base[rank]));
            }
            return bases;
          },
          [](EpContext& self, const std::vector<uintptr_t>& bases) {
            if (static_cast<int>(bases.size()) != self.shape.ep_size) {
              throw std::invalid_argument("window_bases has " + std::to_string(bases.size()) +
                                          " entries; it needs one for each rank");
            }
            for (size_t rank = 0; rank < bases.size(); ++rank) {
              self.window_base[rank] = reinterpret_cast<void*>(bases[rank]);
            }
          });
  pointer(type, "expert_rank", &EpContext::expert_rank);
  pointer(type, "expert_local", &EpContext::expert_local);
  pointer(type, "expert_order", &EpContext::expert_order);
  pointer(type, "owner_first", &EpContext::owner_first);
  pointer(type, "fault", &EpContext::fault);
}

void bind_plan(py::module_& module) {
  py::class_<EpPlan> type(module, "PlanPointers", py::module_local());
  type.def(py::init([] { return EpPlan{}; }))
      .def_readwrite("num_tokens", &EpPlan::num_tokens)
      .def_readwrite("num_topk", &EpPlan::num_topk)
      .def_readwrite("reserved", &EpPlan::reserved);
  pointer(type, "dst_rank", &EpPlan::dst_rank);
  pointer(type, "dst_row", &EpPlan::dst_row);
  pointer(type, "contributor", &EpPlan::contributor);
  pointer(type, "counts", &EpPlan::counts);
  pointer(type, "tokens_per_expert", &EpPlan::tokens_per_expert);
  pointer(type, "padded_tokens_per_expert", &EpPlan::padded_tokens_per_expert);
  pointer(type, "expert_offsets", &EpPlan::expert_offsets);
  pointer(type, "totals", &EpPlan::totals);
  pointer(type, "record_header", &EpPlan::record_header);
  pointer(type, "record_row", &EpPlan::record_row);
  pointer(type, "chunk_first", &EpPlan::chunk_first);
  pointer(type, "source_tokens", &EpPlan::source_tokens);
}

// Arguments of one kernel: context and plan, then its own.
template <class Args>
py::class_<Args> bind_args(py::module_& module, const char* name) {
  py::class_<Args> type(module, name, py::module_local());
  type.def(py::init([](const EpContext& context, const EpPlan& plan) {
             Args args{};
             args.context = context;
             args.plan = plan;
             return args;
           }),
           py::arg("context"), py::arg("plan"))
      .def_readwrite("context", &Args::context)
      .def_readwrite("plan", &Args::plan);
  return type;
}

void bind_calls(py::module_& module) {
  auto route = bind_args<EpRouteArgs>(module, "RouteArgs");
  pointer(route, "topk_idx", &EpRouteArgs::topk_idx);
  pointer(route, "mailbox", &EpRouteArgs::mailbox);
  route.def_readwrite("capacity_rows", &EpRouteArgs::capacity_rows)
      .def_readwrite("alignment", &EpRouteArgs::alignment)
      .def_readwrite("only_refusals", &EpRouteArgs::only_refusals)
      .def_readwrite("ticket", &EpRouteArgs::ticket)
      .def_readwrite("segment_tokens", &EpRouteArgs::segment_tokens);
  pointer(route, "segment_shift", &EpRouteArgs::segment_shift);
  pointer(route, "verdict", &EpRouteArgs::verdict);
  auto dispatch = bind_args<EpDispatchArgs>(module, "DispatchArgs");
  pointer(dispatch, "x", &EpDispatchArgs::x);
  pointer(dispatch, "topk_weights", &EpDispatchArgs::topk_weights);
  dispatch.def_readwrite("row_bytes", &EpDispatchArgs::row_bytes)
      .def_readwrite("recv_x_offset", &EpDispatchArgs::recv_x_offset)
      .def_readwrite("recv_weights_offset", &EpDispatchArgs::recv_weights_offset)
      .def_readwrite("recv_rows", &EpDispatchArgs::recv_rows)
      .def_readwrite("duplicate", &EpDispatchArgs::duplicate);
  auto combine = bind_args<EpCombineArgs>(module, "CombineArgs");
  pointer(combine, "expert_out", &EpCombineArgs::expert_out);
  pointer(combine, "out", &EpCombineArgs::out);
  pointer(combine, "row_weights_grad", &EpCombineArgs::row_weights_grad);
  pointer(combine, "weights_grad", &EpCombineArgs::weights_grad);
  combine.def_readwrite("hidden", &EpCombineArgs::hidden)
      .def_readwrite("dtype", &EpCombineArgs::dtype)
      .def_readwrite("exact", &EpCombineArgs::exact)
      .def_readwrite("form", &EpCombineArgs::form)
      .def_readwrite("expert_out_offset", &EpCombineArgs::expert_out_offset)
      .def_readwrite("row_weights_grad_offset", &EpCombineArgs::row_weights_grad_offset)
      .def_readwrite("segment_tokens", &EpCombineArgs::segment_tokens)
      .def_readwrite("home_segment", &EpCombineArgs::home_segment)
      .def_readwrite("segment_stride", &EpCombineArgs::segment_stride);
  pointer(combine, "segment_out", &EpCombineArgs::segment_out);
  pointer(combine, "own_out", &EpCombineArgs::own_out);
  bind_call<EpRouteArgs>(module, "route", &ep_route, &ep_route_world);
  bind_call<EpDispatchArgs>(module, "dispatch", &ep_dispatch, &ep_dispatch_world);
  bind_call<EpCombineArgs>(module, "combine", &ep_combine, &ep_combine_world);
}

// What lies at an address that Python passes.
template <class Struct>
const Struct* at_address(const char* name, uintptr_t address) {
  if (address == 0) {
    throw std::invalid_argument(std::string(name) + " is 0; it must be the address of host memory");
  }
  return reinterpret_cast<const Struct*>(address);
}

// Waits until route has written the mailbox; False if the fault came first or time ran out.
bool wait_for_mailbox(uintptr_t mailbox, uint64_t ticket, uintptr_t fault, double timeout_s) {
  constexpr int kSpinsPerCheck = 1024;
  const auto* letter = at_address<EpMailbox>("mailbox", mailbox);
  const auto* filed = at_address<EpFault>("fault", fault);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int spins = 1; __atomic_load_n(&letter->ticket, __ATOMIC_ACQUIRE) != ticket; ++spins) {
    if (spins % kSpinsPerCheck == 0) {
      if (__atomic_load_n(&filed->filed, __ATOMIC_ACQUIRE) != 0 ||
          std::chrono::steady_clock::now() > end) {
        return false;
      }
      std::this_thread::yield();
    }
  }
  return true;
}

void bind_host_words(py::module_& module) {
  py::class_<EpMailbox>(module, "Mailbox", py::module_local())
      .def_readonly("ticket", &EpMailbox::ticket)
      .def_readonly("num_rows", &EpMailbox::num_rows)
      .def_readonly("demand_rows", &EpMailbox::demand_rows)
      .def_readonly("num_records", &EpMailbox::num_records)
      .def_readonly("bad_token", &EpMailbox::bad_token)
      .def_readonly("bad_expert", &EpMailbox::bad_expert)
      .def_readonly("refused_rank", &EpMailbox::refused_rank);
  py::class_<EpFault>(module, "Fault", py::module_local())
      .def_readonly("filed", &EpFault::filed)
      .def_readonly("rank", &EpFault::rank)
      .def_readonly("peer", &EpFault::peer)
      .def_readonly("phase", &EpFault::phase)
      .def_readonly("channel", &EpFault::channel)
      .def_readonly("expected", &EpFault::expected)
      .def_readonly("seen", &EpFault::seen);
  module.attr("MAILBOX_BYTES") = sizeof(EpMailbox);
  module.attr("FAULT_BYTES") = sizeof(EpFault);
  module.def("read_mailbox",
             [](uintptr_t at) { return EpMailbox(*at_address<EpMailbox>("mailbox", at)); });
  module.def("read_fault", [](uintptr_t at) { return EpFault(*at_address<EpFault>("fault", at)); });
  module.def("wait_for_mailbox", &wait_for_mailbox, py::arg("mailbox"), py::arg("ticket"),
             py::arg("fault"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_kernels(py::module_& module) {
  bind_window(module);
  bind_context(module);
  bind_plan(module);
  bind_calls(module);
  bind_host_words(module);
  bind_rail(module);
}

}  // namespace ep
