"""The runtime migration engine: where blocks are, and how they move. A part of teraio, not a public API."""

from runtime.torch_names import require_known

require_known()  # before anything else of it is imported
