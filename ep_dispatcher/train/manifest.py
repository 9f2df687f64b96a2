"""What a checkpoint folder says about itself: its config, its text, and a digest of each file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ep_dispatcher.errors import EpError

MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ends the name of a folder that is being written
_PREFIX = "step_"
_BLOCK_BYTES = 1 << 20


class CheckpointError(EpError):
    """A checkpoint that cannot be used for this run."""


@dataclass(frozen=True)
class Manifest:
    """Written last, so a folder that has one is complete.

    Attributes:
        step: optimizer steps done.
        identity: of the config (`TrainConfig.identity`).
        corpus_sha256: of the text.
        files: sha256 of every other file, by name.
    """

    step: int
    identity: dict[str, Any]
    corpus_sha256: str
    files: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read it from a folder.

        Raises:
            CheckpointError: it is missing or not readable.
        """
        try:
            return cls(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {folder} has no readable {MANIFEST} ({error}); {_way_out(folder)}"
            ) from error

    def check_same_run(self, folder: Path, identity: dict[str, Any], corpus_sha256: str) -> None:
        """Raise if a run with this config and text cannot go on from here.

        Raises:
            CheckpointError: names the first key that differs, and both values.
        """
        for section, values in identity.items():
            saved = self.identity.get(section, {})
            for key in sorted(values.keys() | saved.keys()):
                if values.get(key) != saved.get(key):
                    raise CheckpointError(
                        f"{section}.{key} is {values.get(key)!r}; the checkpoint in {folder} was "
                        f"made with {saved.get(key)!r}. Set {section}.{key}={saved.get(key)} to "
                        "go on, or start another run with another --out"
                    )
        if corpus_sha256 != self.corpus_sha256:
            raise CheckpointError(
                f"the text is not the one that the checkpoint in {folder} was trained on; give the "
                "same --data, or start another run with another --out"
            )

    def damage(self, folder: Path, part: int = 0, num_parts: int = 1) -> str:
        """Say what is wrong with the files of a folder; nothing if all is well.

        Args:
            folder: of the checkpoint.
            part: look at every `num_parts`-th file from this one.
            num_parts: ranks that share the work.
        """
        for name in sorted(self.files)[part::num_parts]:
            path = folder / name
            if not path.is_file():
                return f"checkpoint {folder}: file {name} is missing; {_way_out(folder)}"
            if digest(path) != self.files[name]:
                return f"checkpoint {folder}: file {name} is damaged; {_way_out(folder)}"
        return ""


def digest(path: Path) -> str:
    """The sha256 of a file."""
    value = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value.update(block)
    return value.hexdigest()


def folder_of(root: Path, step: int) -> Path:
    """Folder of a checkpoint."""
    return root / f"{_PREFIX}{step:08d}"


def finished(root: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    return sorted(
        path for path in root.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()
    )


def _way_out(folder: Path) -> str:
    """What a user can do about a checkpoint that cannot be read."""
    return (
        f"delete the folder {folder.name} to go on from the checkpoint before it (from the start "
        "if it is the only one), or start another run with another --out"
    )
