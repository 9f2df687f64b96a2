// Python module `_C`: versions and capabilities; the other files of this folder add the rest.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/kernels.h"
#include "core/checks.h"
#include "core/nccl_library.h"
#include "core/version.h"

namespace py = pybind11;

namespace ep {

// Our exceptions become those of ep_dispatcher.errors, so that users catch one family.
void bind_errors(py::module_& module) {
  py::module_ errors = py::module_::import("ep_dispatcher.errors");
  module.attr("CapacityError") = errors.attr("CapacityError");
  module.attr("UnavailableError") = errors.attr("UnavailableError");
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (const CapacityError& error) {
      py::set_error(py::module_::import("ep_dispatcher.errors").attr("CapacityError"),
                    error.what());
    } catch (const UnavailableError& error) {
      py::set_error(py::module_::import("ep_dispatcher.errors").attr("UnavailableError"),
                    error.what());
    }
  });
}

namespace {

void bind_versions(py::module_& module) {
  py::class_<BuildVersions>(module, "BuildVersions")
      .def_readonly("nccl", &BuildVersions::nccl)
      .def_readonly("cuda", &BuildVersions::cuda);
  py::class_<DeviceInfo>(module, "DeviceInfo")
      .def_readonly("device", &DeviceInfo::device)
      .def_readonly("name", &DeviceInfo::name)
      .def_readonly("compute_capability", &DeviceInfo::compute_capability)
      .def_readonly("num_sms", &DeviceInfo::num_sms)
      .def_readonly("memory_bytes", &DeviceInfo::memory_bytes);
  py::class_<DeviceQuery>(module, "DeviceQuery")
      .def_readonly("devices", &DeviceQuery::devices)
      .def_readonly("driver_cuda", &DeviceQuery::driver_cuda)
      .def_readonly("why_no_gpus", &DeviceQuery::why_no_gpus);
  module.def("build_versions", &build_versions);
  module.def("query_devices", &query_devices);
  module.def("nccl_version_text", &nccl_version_text, py::arg("code"));
}

void bind_nccl_library(py::module_& module) {
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(module, "NcclLibrary")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("version", &NcclLibrary::version)
      .def_property_readonly("path", &NcclLibrary::path);
  module.def("loaded_nccl_version", &loaded_nccl_version);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native core of ep_dispatcher. Pointers and streams are plain integers.";
  ep::bind_errors(module);
  ep::bind_versions(module);
  ep::bind_nccl_library(module);
  ep::bind_communicator(module);
  ep::bind_kernels(module);
}
