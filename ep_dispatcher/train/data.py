"""Text as bytes: which files, in which order, and which bytes a rank reads at which step.

Sampling is a pure function of (seed, step, data rank, micro-batch): a resumed run needs no state.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ep_dispatcher.errors import EpError
from ep_dispatcher.train.config import DataSection

SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", ".git", "node_modules", "test")
SEPARATOR = b"\n"  # between files


class DataError(EpError):
    """Text that is missing, unreadable or too short."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """All text that a run may read, the same on every rank.

    Attributes:
        tokens: [B] uint8, one token a byte.
        sha256: of the bytes; a resumed run must find the same.
        num_files: how many files they came from.
        source: what was asked for, in words.
    """

    tokens: Tensor
    sha256: str
    num_files: int
    source: str

    def batch(self, key: BatchKey, micro_batch: int, seq_length: int) -> tuple[Tensor, Tensor]:
        """Draw the sequences of one micro-batch.

        Args:
            key: which micro-batch.
            micro_batch: B, sequences.
            seq_length: S, tokens of each.

        Returns:
            Tokens [B, S] int64, and labels [B, S] int64: the byte after each.

        Example: text "abcd", S=3, start 0 -> tokens "abc", labels "bcd".
        """
        generator = torch.Generator().manual_seed(key.seed_value())
        last = len(self.tokens) - seq_length
        starts = torch.randint(last, (micro_batch, 1), generator=generator)
        text = self.tokens[starts + torch.arange(seq_length + 1)].long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class BatchKey:
    """Names one micro-batch of a run.

    Attributes:
        seed: of the run.
        step: optimizer step, from 0.
        data_rank: data-parallel rank.
        index: micro-batch of the step.
    """

    seed: int
    step: int
    data_rank: int
    index: int

    def seed_value(self) -> int:
        """63 bits that depend on all four numbers."""
        text = f"{self.seed} {self.step} {self.data_rank} {self.index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def load_corpus(section: DataSection, seq_length: int) -> Corpus:
    """Read the text that a config names.

    Args:
        section: what to read.
        seq_length: the text must hold at least one sequence and one byte more.

    Raises:
        DataError: no such path, no text file in the folder, or too little text.
    """
    root, source = _root_of(section)
    suffixes = tuple(section.suffixes.split()) if section.path is not None else (".py",)
    parts: list[bytes] = []
    size = 0
    for path in [root] if root.is_file() else _files_in(root, suffixes):
        try:
            part = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from error
        parts.append(part[: section.max_bytes - size])
        size += len(parts[-1]) + len(SEPARATOR)
        if size >= section.max_bytes:
            break
    if not parts:
        raise DataError(
            f"{source} holds no file that ends in {', '.join(suffixes)}; give another --data, or "
            "name the endings with --set data.suffixes='.log .dat'"
        )
    text = SEPARATOR.join(parts)
    if len(text) <= seq_length:
        raise DataError(
            f"{source} holds {len(text)} bytes of text; model.seq_length {seq_length} needs at "
            f"least {seq_length + 1}. Give more text, or lower model.seq_length"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), len(parts), source)


def _root_of(section: DataSection) -> tuple[Path, str]:
    """The file or folder to read, and how to call it."""
    if section.path is None:
        return Path(sysconfig.get_path("stdlib")), "the Python standard library"
    root = Path(section.path).expanduser()
    if not root.exists():
        raise DataError(f"data path {section.path!r} does not exist; give a text file or a folder")
    return root, section.path


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Text files below a folder, in an order that does not depend on the file system."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.is_symlink():
                yield from _files_in(path, suffixes)
        elif path.name.endswith(suffixes) and path.is_file():
            yield path
