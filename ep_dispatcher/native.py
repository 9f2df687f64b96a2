"""The native module `_C`: whether it can be used here, and if not, what is missing."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ep_dispatcher.errors import UnavailableError

if TYPE_CHECKING:
    from ep_dispatcher import _C

OLDEST_COMPUTE_CAPABILITY = 90  # the bulk copy engine; 10 * major + minor
_SOURCE_FOLDERS = ("api", "bindings", "core", "kernels", "transport")  # of csrc, as in setup.py
_REBUILD = "python setup.py build_ext --inplace"
_HOW_TO_BUILD = (
    "install ep_dispatcher again where nvcc is on PATH and the NCCL wheel is installed "
    "(pip install --no-deps 'nvidia-nccl-cu13>=2.30.7', cu12 for CUDA 12)"
)


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA shows us.

    Attributes:
        compute_capability: 10 * major + minor.
    """

    name: str
    compute_capability: int
    num_sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Capabilities:
    """What this machine offers the device tier.

    Attributes:
        nccl_compiled, cuda_compiled: versions the module was built with; None without a module.
        nccl_loaded: version of the NCCL that the device tier would use; None where none will do.
        nccl_path: the file it comes from.
        driver_cuda: newest CUDA that the driver supports; None without a driver.
        gpus: what CUDA shows; empty without a GPU.
        missing: why the device tier cannot run here, in one sentence; None where it can.
    """

    nccl_compiled: str | None
    cuda_compiled: str | None
    nccl_loaded: str | None
    nccl_path: str | None
    driver_cuda: str | None
    gpus: tuple[Gpu, ...]
    missing: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def load() -> Any:  # noqa: ANN401  # a module; _C.pyi types it for those who import the name
    """Import the native module. Needs no GPU and no NCCL.

    Raises:
        UnavailableError: it was not built; says what to do.
    """
    try:
        return importlib.import_module("ep_dispatcher._C")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"this installation has no native module; {_HOW_TO_BUILD}"
        ) from error
    except ImportError as error:
        raise UnavailableError(
            f"the native module does not load ({error}); {_HOW_TO_BUILD}"
        ) from error


def open_nccl() -> _C.NcclLibrary:
    """Open the first NCCL that will do: the one in this process, NCCL_HOME, the wheel, the system.

    A copy that is too old stays beside ours and keeps serving whoever loaded it.

    Raises:
        UnavailableError: none is new enough; says which was seen and how to get one.
    """
    module = load()
    refusals = []
    for path in ("", *_nccl_files()):
        try:
            return cast("_C.NcclLibrary", module.NcclLibrary(path))
        except UnavailableError as error:
            refusals.append(str(error))
    too_old = [text for text in refusals if "older than" in text]
    raise UnavailableError((too_old or refusals)[0])


def missing_reason() -> str | None:
    """Why the device tier cannot run on this machine, in one sentence; None where it can."""
    return capabilities().missing


def stale_reason(package: Path = Path(__file__).parent) -> str | None:
    """Say in one sentence that the module is older than its sources; None where it is not.

    By file times, like `scripts/shared_gpu.sh`: a build makes the module newer than all of them.
    Nothing is said where there is no module, or no csrc beside the package, as once installed.

    Args:
        package: folder of ep_dispatcher.
    """
    names = (f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    module = next((package / name for name in names if (package / name).is_file()), None)
    root = package.resolve().parent
    folders = [root / "csrc" / name for name in _SOURCE_FOLDERS]
    sources = [path for folder in folders for path in folder.glob("*.[ch]*")]
    if module is None or not sources:
        return None
    sources += [path for path in [root / "setup.py"] if path.is_file()]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime <= module.stat().st_mtime:
        return None
    return (
        f"the native module {module.name} is older than {newest.relative_to(root)}: rebuild it "
        f"with `{_REBUILD}`"
    )


def capabilities() -> Capabilities:
    """Ask the machine; never raises for what it lacks."""
    try:
        module = load()
    except UnavailableError as error:
        return Capabilities(None, None, None, None, None, (), str(error))
    library, nccl_refusal = _try_nccl()
    query = module.query_devices()
    build = module.build_versions()
    gpus = tuple(
        Gpu(info.name, info.compute_capability, info.num_sms, info.memory_bytes)
        for info in query.devices
    )
    return Capabilities(
        nccl_compiled=module.nccl_version_text(build.nccl),
        cuda_compiled=_cuda_text(build.cuda),
        nccl_loaded=module.nccl_version_text(library.version) if library else None,
        nccl_path=library.path if library else None,
        driver_cuda=_cuda_text(query.driver_cuda) if query.driver_cuda else None,
        gpus=gpus,
        missing=_gpu_refusal(gpus, query.why_no_gpus) or nccl_refusal,
    )


def _try_nccl() -> tuple[_C.NcclLibrary | None, str | None]:
    """The NCCL that will do, or why none does."""
    try:
        return open_nccl(), None
    except UnavailableError as error:
        return None, str(error)


def _gpu_refusal(gpus: tuple[Gpu, ...], why_no_gpus: str) -> str | None:
    """Why these GPUs cannot run the kernels; None if any can."""
    if not gpus:
        return f"no GPU is visible ({why_no_gpus or 'CUDA reports none'})"
    best = max(gpu.compute_capability for gpu in gpus)
    if best < OLDEST_COMPUTE_CAPABILITY:
        return (
            f"the newest GPU here has compute capability {best / 10:.1f}; "
            f"the kernels need {OLDEST_COMPUTE_CAPABILITY / 10:.1f} (Hopper) or later"
        )
    return None


def _nccl_files() -> list[str]:
    """Files that may hold NCCL, best first; the last is a name for the loader to find."""
    folders = []
    if "NCCL_HOME" in os.environ:
        folders.append(Path(os.environ["NCCL_HOME"], "lib"))
    for name in ("nvidia.nccl", "nvidia"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        places = (spec.submodule_search_locations if spec else None) or []
        below = "lib" if name == "nvidia.nccl" else "nccl/lib"
        folders += [Path(place, below) for place in places]
    files = [str(folder / "libnccl.so.2") for folder in folders]
    return [*dict.fromkeys(file for file in files if Path(file).is_file()), "libnccl.so.2"]


def _cuda_text(code: int) -> str:
    """13000 -> "13.0"."""
    return f"{code // 1000}.{code % 1000 // 10}"
