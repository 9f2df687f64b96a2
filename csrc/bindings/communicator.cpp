// Python over communicator and arena. Blocking calls let other Python threads run.
#include "core/communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "core/arena.h"
#include "core/checks.h"
#include "core/rails.h"
#include "transport/gin_probe.h"

namespace py = pybind11;
using namespace py::literals;

namespace ep {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// A context manager: the offer stands between __enter__ and __exit__.
struct OfferScope {
  std::shared_ptr<Arena> arena;
  std::unique_ptr<SegmentOffer> offer;
};

void bind_offer(py::module_& module) {
  py::class_<OfferScope>(module, "SegmentOffer")
      .def(py::init(
               [](std::shared_ptr<Arena> arena) { return OfferScope{std::move(arena), nullptr}; }),
           py::arg("arena"))
      .def("__enter__",
           [](OfferScope& scope) { scope.offer = std::make_unique<SegmentOffer>(*scope.arena); })
      .def("__exit__", [](OfferScope& scope, const py::args&) { scope.offer.reset(); });
}

// Starts the probe; its results are complete when the stream is.
void probe_rails(const Rails& rails, const Arena& arena, int rounds, double timeout_s,
                 uintptr_t results, uintptr_t stream) {
  GinProbeArgs args{};
  args.net = rails.handle();
  args.window = reinterpret_cast<char*>(arena.base());
  args.rounds = rounds;
  args.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  args.results = reinterpret_cast<GinProbeResult*>(results);
  EP_CHECK_CUDA(launch_gin_probe(args, reinterpret_cast<cudaStream_t>(stream)));
}

void bind_rails(py::module_& module) {
  py::class_<RailShape>(module, "RailShape")
      .def(
          py::init([](int num_contexts, int signals_per_domain, int num_counters, int queue_depth) {
            return RailShape{num_contexts, signals_per_domain, num_counters, queue_depth};
          }),
          py::kw_only(), py::arg("num_contexts"), py::arg("signals_per_domain"),
          py::arg("num_counters"), py::arg("queue_depth") = 0);
  py::class_<GinHandle>(module, "GinHandle").def(py::init<>());
  py::class_<Rails, std::shared_ptr<Rails>>(module, "Rails")
      .def(py::init<std::shared_ptr<Communicator>, const Arena&, const RailShape&>(),
           py::arg("communicator"), py::arg("arena"), py::arg("shape"), Unlocked())
      .def_property_readonly("handle", &Rails::handle)
      .def_property_readonly("device_comm",
                             [](const Rails& rails) {
                               return reinterpret_cast<uintptr_t>(rails.handle().device_comm);
                             })
      .def_property_readonly(
          "window",
          [](const Rails& rails) { return reinterpret_cast<uintptr_t>(rails.handle().window); })
      .def_property_readonly("num_contexts",
                             [](const Rails& rails) { return rails.handle().num_contexts; })
      .def("close", &Rails::close, Unlocked())
      .def("forget", &Rails::forget);
  module.attr("PROBE_RESULT_BYTES") = sizeof(GinProbeResult);
  module.attr("PROBE_SIGNALS") = kProbeSignals;
  module.def("gin_probe_window_bytes", &gin_probe_window_bytes, py::arg("num_domains"));
  module.def("probe_rails", &probe_rails, py::arg("rails"), py::arg("arena"), py::arg("rounds"),
             py::arg("timeout_s"), py::arg("results"), py::arg("stream"));
  module.def(
      "read_probe_result",
      [](uintptr_t at, int domain) {
        const GinProbeResult& result = reinterpret_cast<const GinProbeResult*>(at)[domain];
        return py::dict("finished"_a = result.finished, "wrong_words"_a = result.wrong_words,
                        "total_ns"_a = result.total_ns, "shortest_ns"_a = result.shortest_ns);
      },
      py::arg("at"), py::arg("domain"));
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<CommunicatorProperties>(module, "CommunicatorProperties")
      .def_readonly("device_api", &CommunicatorProperties::device_api)
      .def_readonly("num_domains", &CommunicatorProperties::num_domains)
      .def_readonly("rail_gin", &CommunicatorProperties::rail_gin);
  module.def("make_communicator_id",
             [](const NcclLibrary& library) { return py::bytes(Communicator::make_id(library)); });
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init<std::shared_ptr<NcclLibrary>, const std::string&, int, int>(),
           py::arg("library"), py::arg("id"), py::arg("rank"), py::arg("size"), Unlocked())
      .def("properties", &Communicator::properties)
      .def("close", &Communicator::close, Unlocked())
      .def("abort", &Communicator::abort, Unlocked());
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init<std::shared_ptr<Communicator>, int64_t, int64_t>(), py::arg("communicator"),
           py::arg("control_bytes"), py::arg("heap_bytes"), Unlocked())
      .def("share", &Arena::share, Unlocked())
      .def_property_readonly("window_bases", &Arena::window_bases)
      .def_property_readonly("base", &Arena::base)
      .def_property_readonly("heap", &Arena::heap)
      .def_property_readonly("heap_bytes", &Arena::heap_bytes)
      .def("read_word", &Arena::read_word, py::arg("offset"), Unlocked())
      .def("write_word", &Arena::write_word, py::arg("offset"), py::arg("word"), Unlocked())
      .def("close", &Arena::close, Unlocked())
      .def("forget", &Arena::forget);
  bind_offer(module);
  bind_rails(module);
}

}  // namespace ep
