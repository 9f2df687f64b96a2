// How the C ABI refuses arguments: the first value out of range, kept for ep_last_error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "api/ep_dispatcher.h"

namespace ep {

// Keeps a message for ep_last_error; EP_INVALID_ARGUMENT.
EpStatus refuse(const std::string& message);

// The status of a launch; keeps what CUDA says.
EpStatus note_launch(cudaError_t result);

// A rank whose routing is refused takes part in the plan with an alignment that no other has asked
// for, so that all hear of it.
constexpr int64_t kRefusedAlignment = 4095;
constexpr int64_t kMaxAlignment = 4096;

// Notes the first value that is out of range.
class Checker {
 public:
  void range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
      fail(std::string(name) + " is " + std::to_string(value) + "; it must be in [" +
           std::to_string(low) + ", " + std::to_string(high) + "]");
    }
  }

  void multiple(const char* name, int64_t value, int64_t step) {
    if (value % step != 0) {
      fail(std::string(name) + " is " + std::to_string(value) + "; it must be a multiple of " +
           std::to_string(step));
    }
  }

  // Of a field that a later version may give a meaning.
  void zero(const char* name, int64_t value) {
    if (value != 0) {
      fail(std::string(name) + " is " + std::to_string(value) + "; it must be 0");
    }
  }

  void null(const char* name, const void* value) {
    if (value != nullptr) {
      fail(std::string(name) + " is " +
           std::to_string(static_cast<int64_t>(reinterpret_cast<uintptr_t>(value))) +
           "; it must be NULL");
    }
  }

  // Of an alignment of rows: what Python lets users ask for, and the refusal's own.
  void alignment(int64_t value) {
    const bool power = value > 0 && (value & (value - 1)) == 0;
    if (value != kRefusedAlignment && (value < 1 || value > kMaxAlignment || !power)) {
      fail("alignment is " + std::to_string(value) + "; it must be a power of two in [1, " +
           std::to_string(kMaxAlignment) + "], or " + std::to_string(kRefusedAlignment) +
           " on a rank that refuses its routing");
    }
  }

  void equal(const char* name, int64_t value, int64_t first) {
    if (value != first) {
      fail(std::string(name) + " is " + std::to_string(value) + " on one rank of a launch and " +
           std::to_string(first) + " on its first; it must be equal");
    }
  }

  void pointer(const char* name, const void* value, bool needed, int64_t alignment = 4) {
    if (needed && value == nullptr) {
      fail(std::string(name) + " is NULL; it must be memory that the GPU can reach");
    }
    multiple(name, static_cast<int64_t>(reinterpret_cast<uintptr_t>(value)), alignment);
  }

  void fail(const std::string& message) {
    if (ok()) {
      message_ = message;
    }
  }

  bool ok() const { return message_.empty(); }
  EpStatus status() const { return ok() ? EP_OK : refuse(message_); }

 private:
  std::string message_;
};

constexpr int64_t kMaxTokens = int64_t{1} << 20;
constexpr int64_t kMaxRows = INT32_MAX;
constexpr int64_t kMaxRowBytes = int64_t{1} << 30;
constexpr int kRowAlignment = 16;
constexpr int kLongAlignment = 8;

// Sizes first: where one is out of range, what depends on it is not computed.
void check_shape(Checker* check, const EpWindowShape& shape);
void check_context(Checker* check, const EpContext& context);
void check_plan(Checker* check, const EpContext& context, const EpPlan& plan);

// Of a dispatch: where its rows go, behind the first `control_bytes` of the window, and how.
void check_outputs(Checker* check, const EpDispatchArgs& args, int64_t control_bytes);

// Where sums of several domains' tokens go. After the sizes.
void check_segments(Checker* check, const EpCombineArgs& args);

// Of two ranks of one launch: different ranks, whose windows are laid out alike.
void check_pair(Checker* check, const EpContext& context, const EpContext& earlier);

}  // namespace ep
