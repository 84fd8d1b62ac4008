from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def fast_compile() -> Iterator[None]:
    """Compiling is most of these tests' time; nothing here depends on how fast the programs run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
