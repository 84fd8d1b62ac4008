"""Counts of the tokens, words and bytes of a text, and its loss in the units that papers report."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """The size of a split in several units. The total loss per unit can be compared between models.

    Attributes:
      tokens: number of tokens of the text; each token is predicted once.
      words: number of words separated by spaces, plus one for the end of each line, as WikiText counts them.
      bytes: number of bytes of the text in UTF-8.
      unknown: number of tokens that represent words outside the vocabulary.
    """

    tokens: int
    words: int
    bytes: int
    unknown: int = 0

    def per_unit(self, nats: float) -> dict[str, float]:
        """Converts `nats`, the sum of the losses of all these tokens, to the units that papers report.

            loss = nats/tokens, perplexity = exp(nats/words), bits_per_byte = nats/(bytes · ln 2).

        Perplexities per word can be compared between tokenizers: the probability of a word is the product of the
        probabilities of its tokens. By WikiText's convention every line ends with a word, `<eos>`. Code has no agreed
        division into words; report bits per byte, or the perplexity per token, exp(loss), and name the tokenizer.

        If some tokens are unknown, only the results per token are returned. These can be compared only between models
        with the same vocabulary. A model that predicts `<unk>` has not predicted the word, so a smaller vocabulary
        would give better results per word and per byte.

        >>> Counts(tokens=6, words=4, bytes=20).per_unit(18.0)
        {'loss': 3.0, 'token_perplexity': 20.08..., 'perplexity': 90.01..., 'bits_per_byte': 1.29...}
        """
        with np.errstate(over="ignore"):  # perplexity is infinite if the model has diverged
            found = {"loss": nats / self.tokens, "token_perplexity": float(np.exp(nats / self.tokens))}
            if not self.unknown:
                bits = nats / (self.bytes * float(np.log(2)))
                found |= {"perplexity": float(np.exp(nats / self.words)), "bits_per_byte": bits}
        return found
