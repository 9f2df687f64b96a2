"""Types of the native module; csrc/bindings defines it. Pointers and streams are integers."""

class BuildVersions:
    nccl: int
    cuda: int

class DeviceInfo:
    device: int
    name: str
    compute_capability: int
    num_sms: int
    memory_bytes: int

class DeviceQuery:
    devices: list[DeviceInfo]
    driver_cuda: int
    why_no_gpus: str

class NcclLibrary:
    def __init__(self, path: str) -> None: ...
    version: int
    path: str

class NativeError(RuntimeError): ...

def build_versions() -> BuildVersions: ...
def query_devices() -> DeviceQuery: ...
def nccl_version_text(code: int) -> str: ...
def loaded_nccl_version() -> int: ...
