"""C++ for CPUs, compiled at first use, for encodings whose `native_score` says what they add."""
