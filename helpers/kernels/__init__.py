"""Kernels: reference, wrapper and kernel side by side; CUDA C++ texts in .cu files."""
