"""Compiles training steps for accelerators that need not be present, and reads memory and times
from the programs.
"""
