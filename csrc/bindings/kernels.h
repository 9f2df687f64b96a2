// The part of the Python module that binds the C ABI.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/ep_dispatcher.h"

namespace ep {

void bind_kernels(pybind11::module_& module);
void bind_rail(pybind11::module_& module);  // called by bind_kernels

// A pointer of a C struct, which Python sees as an address.
template <class Struct, class Pointee>
void pointer(pybind11::class_<Struct>& type, const char* name, Pointee* Struct::* member) {
  type.def_property(
      name, [member](const Struct& self) { return reinterpret_cast<uintptr_t>(self.*member); },
      [member](Struct& self, uintptr_t value) {
        self.*member = reinterpret_cast<Pointee*>(value);
      });
}

// Turns a refusal of the C ABI into a Python exception.
inline void check(EpStatus status) {
  if (status == EP_INVALID_ARGUMENT) {
    throw std::invalid_argument(ep_last_error());
  }
  if (status != EP_OK) {
    throw std::runtime_error(ep_last_error());
  }
}

// A call for one rank as `name`, and for all ranks of one launch as `name`_world.
template <class Args>
void bind_call(pybind11::module_& module, const char* name, EpStatus (*one)(const Args*, void*),
               EpStatus (*world)(const Args*, int32_t, void*)) {
  module.def(
      name,
      [one](const Args& args, uintptr_t stream) {
        check(one(&args, reinterpret_cast<void*>(stream)));
      },
      pybind11::arg("args"), pybind11::arg("stream"),
      pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def((std::string(name) + "_world").c_str(),
             [world](const std::vector<Args>& ranks, uintptr_t stream) {
               check(world(ranks.data(), static_cast<int32_t>(ranks.size()),
                           reinterpret_cast<void*>(stream)));
             },
             pybind11::arg("ranks"), pybind11::arg("stream"),
             pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace ep
