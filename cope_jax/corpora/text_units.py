"""What the tokens of a text stand for, and a sum of their losses in the units that papers quote."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the tokens of a split stand for: a sum over all of them, by each of these, is a figure that compares.

    Attributes:
      tokens: of the text, each of which is predicted once.
      words: between spaces, and one for the end of each line, as WikiText counts them.
      bytes: of the text in UTF-8.
      unknown: tokens that stand for any word that the vocabulary has not.
    """

    tokens: int
    words: int
    bytes: int
    unknown: int = 0

    def per_unit(self, nats: float) -> dict[str, float]:
        """`quoted` of the sum of the losses of all these tokens.

        Where some are unknown, only what is by token, and so of this vocabulary alone: a model that predicts `<unk>`
        has not predicted the word, and the fewer words it knows, the better its figures by word and by byte.
        """
        found = per_unit(nats, tokens=self.tokens, words=self.words, num_bytes=self.bytes)
        by_token = ("loss", "token_perplexity")
        return {name: value for name, value in found.items() if not self.unknown or name in by_token}


def per_unit(nats: float, *, tokens: int, words: int, num_bytes: int) -> dict[str, float]:
    """A sum of losses in the units that papers quote.

        loss = nats/tokens, perplexity = exp(nats/words), bits_per_byte = nats/(num_bytes · ln 2).

    A perplexity by words compares between tokenizers: whatever a word was cut into, its probability is the product of
    its parts'. By WikiText's convention every line ends with a word, `<eos>`. For code, which has no words that
    everyone cuts alike, quote bits per byte, or the perplexity by tokens, exp(loss), with its tokenizer.

    Args:
      nats: the sum over all tokens.
      tokens: their number.
      words: the words that they stand for.
      num_bytes: of the text, in UTF-8.

    >>> quoted(18.0, tokens=6, words=4, num_bytes=20)
    {'loss': 3.0, 'token_perplexity': 20.08..., 'perplexity': 90.01..., 'bits_per_byte': 1.29...}
    """
    with np.errstate(over="ignore"):  # of a model that has diverged it is infinite
        return {
            "loss": nats / tokens,
            "token_perplexity": float(np.exp(nats / tokens)),
            "perplexity": float(np.exp(nats / words)),
            "bits_per_byte": nats / (num_bytes * float(np.log(2))),
        }
