// Messages through NCCL's own log (NCCL_DEBUG decides what is shown), or stderr without one.
#pragma once

#include <string>

#include "rma_abi.h"

namespace loopback_rma {

void use_logger(Logger logger);
void warn(const std::string& message);
void info(const std::string& message);

}  // namespace loopback_rma
