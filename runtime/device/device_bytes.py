"""Device memory of which only the address is known, for libraries that take arrays."""

from __future__ import annotations


class DeviceBytes:
    """Bytes in device memory, as the CUDA array interface (version 3) describes them. Does not own them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
