// Every CUDA and NCCL result is checked; a failure says which call, where, and why.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <stdexcept>
#include <string>

namespace ep {

// A call into CUDA or NCCL failed: the machine's or our fault, never a user's mistake.
class NativeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A buffer is too small; the message names the size that would do.
class CapacityError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The machine lacks something; the message says how to get it.
class UnavailableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail_call(const char* call, const char* file, int line,
                                   const std::string& why) {
  throw NativeError(std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " +
                    why);
}

inline void check_cuda(cudaError_t result, const char* call, const char* file, int line) {
  if (result != cudaSuccess) {
    fail_call(call, file, line, cudaGetErrorString(result));
  }
}

}  // namespace ep

#define EP_CHECK_CUDA(call) ::ep::check_cuda((call), #call, __FILE__, __LINE__)
