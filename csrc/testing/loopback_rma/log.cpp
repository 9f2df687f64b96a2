#include "log.h"

#include <atomic>
#include <cstdio>

namespace loopback_rma {
namespace {

std::atomic<Logger> nccl_logger{nullptr};

}  // namespace

void use_logger(Logger logger) {
  nccl_logger = logger;
}

void warn(const std::string& message) {
  if (const Logger logger = nccl_logger) {
    logger(kLogWarn, kLogNet, __FILE__, __LINE__, "loopback_rma: %s", message.c_str());
  } else {
    std::fprintf(stderr, "loopback_rma: %s\n", message.c_str());
  }
}

void info(const std::string& message) {
  if (const Logger logger = nccl_logger) {
    logger(kLogInfo, kLogNet, __FILE__, __LINE__, "loopback_rma: %s", message.c_str());
  }
}

}  // namespace loopback_rma
