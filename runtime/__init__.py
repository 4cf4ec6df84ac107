"""The runtime migration engine: where blocks are, and how they move. A part of teraio, not a public API.

Before any of it is imported, this looks at the system and at PyTorch: an unknown one is refused with a line that says so.
"""

from runtime.torch_names import require_known

require_known()
