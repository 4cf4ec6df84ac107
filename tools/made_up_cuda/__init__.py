"""A GPU made of software under the real CUDA build of PyTorch. README.md here says what it can show, and what it cannot."""
