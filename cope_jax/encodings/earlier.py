"""Converts between current and earlier paths of the parameters of encodings, so that older files can be read.

Before the parts of a composition had names, the path was `encoding.table_NK` for a single encoding, and
`encoding.parts.1.table_NK` in a composition. The current path is `encoding.cope.table` in both cases.
"""

from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from cope_jax.array_types import PyTree

Path = tuple[Any, ...]
_LEAVES = {
    "cope": {"table": "table_NK", "slopes": "slopes_H", "gate_key": "gate_key_DGK"},
    "cope_two_sided": {"tables": "tables_2NK"},
    "kerple": {"r1": "r1_H", "r2": "r2_H"},
    "learned": {"table": "table_ND"},
    "relative": {"table": "table_NK"},
    "t5": {"table": "table_NH"},
}


def earlier_path(path: Path, model: Any) -> Path:
    """Returns the earlier path of the parameter that is now at `path`; `model` is the config of the model.

    >>> from types import SimpleNamespace as Model
    >>> from cope_jax.encodings import EncodingConfig
    >>> model = Model(encoding=EncodingConfig.parse("rope+cope"), encoding_sharing="layer")
    >>> earlier_path(("blocks", "encoding", "cope", "table"), model)
    ('blocks', 'encoding', 'parts', 1, 'table_NK')
    """
    if "encoding" not in path or not hasattr(model, "encoding"):
        return path
    at = path.index("encoding")
    name, *leaf = path[at + 1 :]
    shared, own = model.encoding.split(model.encoding_sharing)
    names = [part for part, _ in (own if "blocks" in path[:at] else shared).parts]
    number = () if len(names) == 1 else ("parts", names.index(name))
    renamed = _LEAVES.get(name, {})
    return (*path[: at + 1], *number, *(renamed.get(part, part) for part in leaf))


def earlier_tree(tree: PyTree, model: Any) -> PyTree:
    """Returns the training state `tree` with every parameter at its earlier path, also in the optimizer's state."""

    def rename(params: Any) -> Any:
        if not isinstance(params, dict):
            return params
        return unflatten_dict({earlier_path(path, model): leaf for path, leaf in flatten_dict(params).items()})

    return jax.tree.map(rename, tree, is_leaf=lambda tree: isinstance(tree, dict))


def from_earlier(like: PyTree, earlier: PyTree, model: Any) -> PyTree:
    """Returns the leaves of `earlier` in the structure of `like`: the inverse of `earlier_tree`."""

    def rename(params: Any, held: Any) -> Any:
        if not isinstance(params, dict):
            return held
        leaves = flatten_dict(held)
        return unflatten_dict({path: leaves[earlier_path(path, model)] for path in flatten_dict(params)})

    return jax.tree.map(rename, like, earlier, is_leaf=lambda tree: isinstance(tree, dict))
