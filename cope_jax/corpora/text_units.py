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
        """The sum of the losses of all these tokens in the units that papers quote.

            loss = nats/tokens, perplexity = exp(nats/words), bits_per_byte = nats/(bytes · ln 2).

        A perplexity by words compares between tokenizers: whatever a word was cut into, its probability is the product
        of its parts'. By WikiText's convention every line ends with a word, `<eos>`. For code, which has no words that
        everyone cuts alike, quote bits per byte, or the perplexity by tokens, exp(loss), with its tokenizer.

        Where some are unknown, only what is by token, and so of this vocabulary alone: a model that predicts `<unk>`
        has not predicted the word, and the fewer words it knows, the better its figures by word and by byte.

        >>> Counts(tokens=6, words=4, bytes=20).per_unit(18.0)
        {'loss': 3.0, 'token_perplexity': 20.08..., 'perplexity': 90.01..., 'bits_per_byte': 1.29...}
        """
        with np.errstate(over="ignore"):  # of a model that has diverged it is infinite
            found = {"loss": nats / self.tokens, "token_perplexity": float(np.exp(nats / self.tokens))}
            if not self.unknown:
                bits = nats / (self.bytes * float(np.log(2)))
                found |= {"perplexity": float(np.exp(nats / self.words)), "bits_per_byte": bits}
        return found
