"""A GPU made of software under the real CUDA build of PyTorch. README.md in this folder says what it can show, and what it cannot."""
