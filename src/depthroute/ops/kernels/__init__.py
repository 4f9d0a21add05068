"""Triton kernels and their launchers; nothing here is imported before a read runs on Triton."""
