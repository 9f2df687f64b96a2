// The parts of the Python module `_C`, one function a file.
#pragma once

#include <pybind11/pybind11.h>

namespace ep {

void bind_errors(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);

}  // namespace ep
