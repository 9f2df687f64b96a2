#include "core/nccl_library.h"

#include <dlfcn.h>

#include "core/checks.h"
#include "core/version.h"

namespace ep {
namespace {

constexpr int kOldestNccl = NCCL_VERSION(2, 30, 7);
constexpr const char* kSoname = "libnccl.so.2";

void* open_library(const std::string& path) {
  if (path.empty()) {
    return dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD);
  }
  // Deep binding: its calls to itself must not end in the older copy that torch has loaded.
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
}

std::string file_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kSoname;
}

int version_of(void* handle) {
  const auto get_version =
      reinterpret_cast<decltype(&ncclGetVersion)>(dlsym(handle, "ncclGetVersion"));
  int version = 0;
  return get_version != nullptr && get_version(&version) == ncclSuccess ? version : 0;
}

}  // namespace

NcclLibrary::NcclLibrary(const std::string& path) : path_(path) {
  void* handle = open_library(path);
  if (handle == nullptr) {
    const char* why = path.empty() ? "this process has loaded none" : dlerror();
    throw UnavailableError(std::string("NCCL could not be opened: ") + why);
  }
  path_ = file_of(dlsym(handle, "ncclGetVersion"));
  version_ = version_of(handle);
  refuse_if_old();
  resolve(handle);
}

void NcclLibrary::refuse_if_old() const {
  if (version_ < kOldestNccl) {
    throw UnavailableError("NCCL " + nccl_version_text(version_) + " (" + path_ +
                           ") is older than 2.30.7, which the device tier needs: pip install "
                           "--no-deps 'nvidia-nccl-cu13>=2.30.7' (cu12 for CUDA 12)");
  }
}

void NcclLibrary::resolve(void* handle) {
#define EP_RESOLVE(name)                                                    \
  name = reinterpret_cast<decltype(name)>(dlsym(handle, #name));            \
  if (name == nullptr) {                                                    \
    throw UnavailableError("NCCL at " + path_ + " has no function " #name); \
  }
  EP_NCCL_FUNCTIONS(EP_RESOLVE)
#undef EP_RESOLVE
}

void NcclLibrary::check(ncclResult_t result, const char* call, const char* file, int line) const {
  if (result != ncclSuccess) {
    fail_call(call, file, line,
              std::string(ncclGetErrorString(result)) + " (" + ncclGetLastError(nullptr) + ")");
  }
}

int loaded_nccl_version() {
  void* handle = open_library("");
  return handle == nullptr ? 0 : version_of(handle);
}

}  // namespace ep
