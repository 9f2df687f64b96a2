// Python over communicator and arena. Blocking calls let other Python threads run.
#include "core/communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "core/arena.h"

namespace py = pybind11;

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

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<CommunicatorProperties>(module, "CommunicatorProperties")
      .def_readonly("device_api", &CommunicatorProperties::device_api)
      .def_readonly("num_domains", &CommunicatorProperties::num_domains);
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
      .def("close", &Arena::close, Unlocked())
      .def("forget", &Arena::forget);
  bind_offer(module);
}

}  // namespace ep
