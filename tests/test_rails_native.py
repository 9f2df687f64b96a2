"""csrc/core/rails.cpp on the host, with stand-ins for NCCL and CUDA: what it leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nccl_headers import NCCL, missing_for_nccl

CSRC = Path(__file__).parents[1] / "csrc"

# NCCL gives argv[1] contexts, memory is there if argv[2] is 1; prints what is open at the end.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <new>
#include "core/rails.h"
static int contexts, memory, open_comms, open_blocks, depth;
extern "C" cudaError_t cudaMalloc(void** data, size_t) {
  open_blocks += memory;
  *data = memory ? &open_blocks : nullptr;
  return memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
extern "C" cudaError_t cudaFree(void*) { --open_blocks; return cudaSuccess; }
extern "C" cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) { return "no memory"; }
namespace ep {
const char* const kHowToGetGin = "";
NcclLibrary::NcclLibrary(const std::string&) {
  ncclDevCommCreate = [](ncclComm_t, const ncclDevCommRequirements_t* wanted, ncclDevComm_t* made) {
    ++open_comms;
    depth = wanted->ginQueueDepth;
    made->ginContextCount = contexts;
    return ncclSuccess;
  };
  ncclDevCommDestroy = [](ncclComm_t, const ncclDevComm_t*) { --open_comms; return ncclSuccess; };
}
void NcclLibrary::check(ncclResult_t, const char*, const char*, int) const {}
Communicator::Communicator(std::shared_ptr<NcclLibrary> library, const std::string&, int, int)
    : library_(std::move(library)) {}
Communicator::~Communicator() {}
CommunicatorProperties Communicator::properties() const {
  CommunicatorProperties properties{};
  properties.num_domains = 2;
  properties.rail_gin = NCCL_GIN_TYPE_PROXY;
  return properties;
}
ncclComm_t Communicator::handle() const { return nullptr; }
}  // namespace ep
int main(int, char** words) {
  contexts = std::atoi(words[1]);
  memory = std::atoi(words[2]);
  alignas(ep::Arena) static char arena[sizeof(ep::Arena)];  // only its window is read
  const auto library = std::make_shared<ep::NcclLibrary>("");
  const auto communicator = std::make_shared<ep::Communicator>(library, "", 0, 2);
  const char* told = "none";
  std::string text;
  try {
    ep::Rails rails(communicator, *reinterpret_cast<ep::Arena*>(arena), {4, 1, 1, 512});
    rails.close();
  } catch (const std::exception& error) {
    text = error.what();
    told = text.c_str();
  }
  std::printf("%d %d %d %s\\n", open_comms, open_blocks, depth, told);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins with rails.cpp."""
    missing = missing_for_nccl()
    if missing:
        pytest.skip(missing)
    if not CSRC.is_dir():
        pytest.skip("csrc is not beside the tests")
    folder = tmp_path_factory.mktemp("rails")
    (folder / "main.cpp").write_text(PROGRAM, encoding="utf-8")
    command = ["nvcc", "-std=c++17", "-cudart=none", f"-I{CSRC}", f"-isystem={NCCL}"]
    command += [str(folder / "main.cpp"), str(CSRC / "core/rails.cpp"), "-o", str(folder / "main")]
    subprocess.run(command, check=True, timeout=120)
    return folder / "main"


@pytest.mark.parametrize(
    ("contexts", "memory", "told"),
    [(4, 1, "none"), (3, 1, "NCCL gives 3 GIN contexts, but 4 are needed"), (4, 0, "no memory")],
)
def test_rails_that_do_not_open_leave_nothing_open(
    program: Path, contexts: int, memory: int, told: str
) -> None:
    """Neither a device communicator nor memory; and NCCL was asked for the depth of queues."""
    words = [str(program), str(contexts), str(memory)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    comms, blocks, depth, text = done.stdout.strip().split(" ", 3)
    assert (comms, blocks, depth) == ("0", "0", "512")
    assert told in text
