// Python over the C ABI of the rails, in the manner of kernels.cpp.
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "api/ep_rail.h"
#include "bindings/kernels.h"

namespace py = pybind11;

namespace ep {
namespace {

EpRail make_rail(const EpContext& context, int num_domains, int domain, int num_blocks,
                 int64_t max_tokens, bool exact, int net) {
  EpRail rail{};
  rail.num_domains = num_domains;
  rail.domain = domain;
  rail.num_blocks = num_blocks;
  rail.max_tokens = max_tokens;
  rail.exact = exact ? 1 : 0;
  rail.net = net;
  check(ep_make_rail_layout(&context, &rail, &rail.layout));
  return rail;
}

void set_bases(EpRail& self, const std::vector<uintptr_t>& bases) {
  if (static_cast<int>(bases.size()) != self.num_domains) {
    throw std::invalid_argument("rail_bases has " + std::to_string(bases.size()) +
                                " entries; it needs one for each domain");
  }
  for (size_t domain = 0; domain < bases.size(); ++domain) {
    self.rail_base[domain] = reinterpret_cast<void*>(bases[domain]);
  }
}

void bind_rail_types(py::module_& module) {
  py::class_<EpRailLayout>(module, "RailLayout", py::module_local())
      .def_readonly("stats", &EpRailLayout::stats)
      .def_readonly("role_times", &EpRailLayout::role_times)
      .def_readonly("shift", &EpRailLayout::shift)
      .def_readonly("verdict", &EpRailLayout::verdict)
      .def_readonly("virtual_topk", &EpRailLayout::virtual_topk)
      .def_readonly("staging", &EpRailLayout::staging)
      .def_readonly("landing", &EpRailLayout::landing)
      .def_readonly("partials", &EpRailLayout::partials)
      .def_readonly("own", &EpRailLayout::own)
      .def_readonly("slot_bytes", &EpRailLayout::slot_bytes)
      .def_readonly("total_bytes", &EpRailLayout::total_bytes)
      .def_readonly("lanes", &EpRailLayout::lanes)
      .def_readonly("signals_per_domain", &EpRailLayout::signals_per_domain)
      .def_readonly("channels", &EpRailLayout::channels);
  py::class_<EpRail> rail(module, "Rail", py::module_local());
  rail.def(py::init(&make_rail), py::arg("context"), py::kw_only(), py::arg("num_domains"),
           py::arg("domain"), py::arg("num_blocks"), py::arg("max_tokens"), py::arg("exact"),
           py::arg("net"))
      .def_readonly("layout", &EpRail::layout)
      .def_readonly("domain", &EpRail::domain)
      .def_readwrite("chaos_seed", &EpRail::chaos_seed)
      .def_readwrite("gin_contexts", &EpRail::gin_contexts)
      .def_readwrite("gin_signals_per_domain", &EpRail::gin_signals_per_domain)
      .def_readwrite("gin_counters", &EpRail::gin_counters)
      .def_property_readonly("chaos_bytes",
                             [](const EpRail& self) { return ep_chaos_bytes(&self); })
      .def("set_rail_bases", &set_bases);
  pointer(rail, "expert_rank", &EpRail::expert_rank);
  pointer(rail, "expert_order", &EpRail::expert_order);
  pointer(rail, "owner_first", &EpRail::owner_first);
  pointer(rail, "chaos", &EpRail::chaos);
  pointer(rail, "gin_device_comm", &EpRail::gin_device_comm);
  pointer(rail, "gin_window", &EpRail::gin_window);
}

// Arguments of a call that has those of its domain in front.
template <class Args, class Domain>
py::class_<Args> bind_args(py::module_& module, const char* name) {
  py::class_<Args> type(module, name, py::module_local());
  type.def(py::init([](const Domain& domain, const EpRail& rail, int64_t num_tokens,
                       uintptr_t dst_rank) {
             Args args{};
             args.domain = domain;
             args.rail = rail;
             args.num_tokens = num_tokens;
             args.dst_rank = reinterpret_cast<const int32_t*>(dst_rank);
             return args;
           }),
           py::arg("domain"), py::arg("rail"), py::arg("num_tokens"), py::arg("dst_rank"))
      .def_readwrite("domain", &Args::domain)
      .def_readwrite("rail", &Args::rail);
  return type;
}

void bind_send(py::module_& module) {
  py::class_<EpRailSendArgs> send(module, "RailSendArgs", py::module_local());
  send.def(py::init([](const EpContext& context, const EpRail& rail) {
             EpRailSendArgs args{};
             args.context = context;
             args.rail = rail;
             return args;
           }),
           py::arg("context"), py::arg("rail"))
      .def_readwrite("num_tokens", &EpRailSendArgs::num_tokens)
      .def_readwrite("row_bytes", &EpRailSendArgs::row_bytes)
      .def_readwrite("num_topk", &EpRailSendArgs::num_topk);
  pointer(send, "topk_idx", &EpRailSendArgs::topk_idx);
  pointer(send, "x", &EpRailSendArgs::x);
  pointer(send, "topk_weights", &EpRailSendArgs::topk_weights);
}

void bind_rail_calls(py::module_& module) {
  py::class_<EpRailPlanArgs> plan(module, "RailPlanArgs", py::module_local());
  plan.def(py::init([](const EpContext& context, const EpRail& rail) {
             EpRailPlanArgs args{};
             args.context = context;
             args.rail = rail;
             return args;
           }),
           py::arg("context"), py::arg("rail"))
      .def_readwrite("context", &EpRailPlanArgs::context)
      .def_readwrite("rail", &EpRailPlanArgs::rail)
      .def_readwrite("num_tokens", &EpRailPlanArgs::num_tokens)
      .def_readwrite("num_topk", &EpRailPlanArgs::num_topk)
      .def_readwrite("alignment", &EpRailPlanArgs::alignment)
      .def_readwrite("capacity_rows", &EpRailPlanArgs::capacity_rows);
  pointer(plan, "topk_idx", &EpRailPlanArgs::topk_idx);
  pointer(plan, "dst_rank", &EpRailPlanArgs::dst_rank);
  pointer(plan, "dst_row", &EpRailPlanArgs::dst_row);
  pointer(plan, "counts", &EpRailPlanArgs::counts);
  bind_send(module);
  bind_args<EpRailDispatchArgs, EpDispatchArgs>(module, "RailDispatchArgs")
      .def_readwrite("sent", &EpRailDispatchArgs::sent);
  bind_args<EpRailReturnArgs, EpCombineArgs>(module, "RailReturnArgs");
  bind_call<EpRailPlanArgs>(module, "rail_exchange", &ep_rail_exchange, &ep_rail_exchange_world);
  bind_call<EpRailPlanArgs>(module, "rail_counts", &ep_rail_counts, &ep_rail_counts_world);
  bind_call<EpRailSendArgs>(module, "rail_send", &ep_rail_send, &ep_rail_send_world);
  bind_call<EpRailDispatchArgs>(module, "rail_dispatch", &ep_rail_dispatch,
                                &ep_rail_dispatch_world);
  bind_call<EpRailReturnArgs>(module, "rail_return", &ep_rail_return, &ep_rail_return_world);
}

}  // namespace

void bind_rail(py::module_& module) {
  bind_rail_types(module);
  bind_rail_calls(module);
}

}  // namespace ep
