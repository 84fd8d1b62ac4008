"""Corpora drawn from together, with weights."""

from cope_jax.corpora.documents import READERS, SAME_TESTS
from cope_jax.errors import ConfigError


def parse(corpus: str) -> tuple[tuple[float, str], ...]:
    """Weights and names of the corpora in a text; a corpus without a weight has 1.

    Raises:
      ConfigError: an unknown corpus, one named twice, two with the same test, a weight that is no positive number.

    >>> parse("3*wikitext-2 + code")
    ((3.0, 'wikitext-2'), (1.0, 'code'))
    """
    parts = []
    for part in corpus.split("+"):
        weight, star, name = part.rpartition("*")
        READERS.get(name.strip())
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise ConfigError(f"text.corpus={corpus!r} has a weight that is no positive number: {weight!r}")
        parts.append((number, name.strip()))
    names = [name for _, name in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"text.corpus={corpus!r} names a corpus twice: give it one weight")
    for group in SAME_TESTS:
        same = [name for name in names if name in group]
        if len(same) > 1:
            raise ConfigError(
                f"text.corpus={corpus!r}: {' and '.join(same)} have the same validation and test: take one"
            )
    return tuple(parts)
