// The part of the Python module that binds the C ABI.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

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

}  // namespace ep
