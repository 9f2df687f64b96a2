// The part of the Python module that binds the C ABI.
#pragma once

#include <pybind11/pybind11.h>

namespace ep {

void bind_kernels(pybind11::module_& module);
void bind_rail(pybind11::module_& module);  // called by bind_kernels

}  // namespace ep
