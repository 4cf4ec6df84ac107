"""The store over ordinary files, read and written by system calls from and to host memory."""

from __future__ import annotations

from runtime.storage import spill_file
from runtime.storage.file_space import FileSpace
from runtime.storage.store import Chunk, Slot


class PosixStore(FileSpace):
    """A `Store` between host memory and the files of a `FileSpace`."""

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_open()  # the number of a closed descriptor may be another file's
        spill_file.write_piece(slot, piece, address)

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_open()
        spill_file.read_piece(slot, piece, address)
