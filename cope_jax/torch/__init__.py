"""Every position encoding for PyTorch and transformers: `attend` on tensors, with JAX inside.

`import cope_jax.torch` imports PyTorch only. The first `Encoding` imports JAX and starts its backend.
"""

from cope_jax.errors import not_installed

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"cope_jax.torch: {not_installed(error) or error}", name=error.name
    ) from None

from cope_jax.torch.add_positions import add_positions as add_positions
from cope_jax.torch.add_positions import from_pretrained as from_pretrained
from cope_jax.torch.torch_module import Encoding as Encoding
from cope_jax.torch.torch_module import attend as attend
