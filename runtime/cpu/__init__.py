"""Main memory as the device."""
