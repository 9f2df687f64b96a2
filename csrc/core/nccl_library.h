// NCCL, opened at run time: the module imports without it, beside an older copy that another
// library has loaded, and on a machine without a GPU.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <string>

namespace ep {

// One opened libnccl.so.2 and the functions we call. Immutable; it stays mapped for the life of
// the process, as NCCL's own threads may outlive any object of ours.
class NcclLibrary {
 public:
  // path: a file, or empty for the copy that this process has loaded already.
  // Throws UnavailableError if it cannot be opened or is older than 2.30.7.
  explicit NcclLibrary(const std::string& path);

  int version() const { return version_; }
  const std::string& path() const { return path_; }

  // Throws NativeError with NCCL's own explanation unless the result is ncclSuccess.
  void check(ncclResult_t result, const char* call, const char* file, int line) const;

#define EP_NCCL_FUNCTIONS(X)  \
  X(ncclGetVersion)           \
  X(ncclGetErrorString)       \
  X(ncclGetLastError)         \
  X(ncclGetUniqueId)          \
  X(ncclCommInitRankConfig)   \
  X(ncclCommQueryProperties)  \
  X(ncclCommFinalize)         \
  X(ncclCommDestroy)          \
  X(ncclCommAbort)            \
  X(ncclMemAlloc)             \
  X(ncclMemFree)              \
  X(ncclCommWindowRegister)   \
  X(ncclCommWindowDeregister) \
  X(ncclDevCommCreate)        \
  X(ncclDevCommDestroy)       \
  X(ncclGetPeerDevicePointer)

#define EP_DECLARE(name) decltype(&::name) name = nullptr;
  EP_NCCL_FUNCTIONS(EP_DECLARE)
#undef EP_DECLARE

 private:
  void resolve(void* handle);
  void refuse_if_old() const;

  std::string path_;
  int version_ = 0;
};

// Version of the libnccl.so.2 that this process has loaded already; 0 if none.
int loaded_nccl_version();

}  // namespace ep

#define EP_CHECK_NCCL(library, call) (library).check((library).call, #call, __FILE__, __LINE__)
