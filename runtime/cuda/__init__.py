"""An NVIDIA GPU as the device."""
