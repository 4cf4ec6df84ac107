"""The runtime migration engine: where blocks are, and how they move. A part of teraio, not a public API."""
