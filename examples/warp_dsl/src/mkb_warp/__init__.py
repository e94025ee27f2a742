"""NVIDIA Warp as a kernel language of MetaKernelBench."""
