"""Measured tables: route (all depth reads of one microbatch) and train (whole training steps). One CUDA device each."""
