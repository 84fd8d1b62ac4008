"""What corpora of word senses have in common."""

import dataclasses
from typing import Literal

Split = Literal["train", "test"]


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A word in a sentence, with its sense.

    Attributes:
      words: the sentence.
      index: the place of the word in it.
      lemma: what has the senses, such as "bank", or "charge.N" where parts of speech are told apart.
      sense: a name, which means something only beside its lemma.
      split: "train" or "test".
    """

    words: tuple[str, ...]
    index: int
    lemma: str
    sense: str
    split: Split
