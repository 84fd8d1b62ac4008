"""Language modelling of words: each word is predicted from all words before it.

Mikolov et al., "Recurrent neural network based language model", Interspeech 2010; Merity et al.,
"Pointer sentinel mixture models", ICLR 2017, for WikiText-2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from cope_jax.corpora import conllu, wikitext
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.stored import WordTask
from cope_jax.tasks.task import TASKS
from cope_jax.tokenizers import word_level
from cope_jax.tokenizers.tokenizer import Codec


@TASKS.register("words")
class Words(WordTask):
    """Predicts each word of a long text. `<eos>` ends lines, is a word, and precedes the text.

    `stream` gives every word once as a target. The exponential of the loss is then the `perplexity`
    that papers report. Without a stream, an example is a window of the text: `dataset` gives the
    windows in order, `sample` gives windows at random places.

    The fields are `inputs`, `targets` and `weights` `[B, L]`. The option `backward` adds the same
    fields of the reversed text, with the prefix `backward_`. A stream adds `reset` `[B]`.

    Attributes:
      vocabulary: the words of the training text, the most frequent first. Words that do not fit
        become `<unk>`.

    >>> task = Words(Words.Config(length=6))
    >>> batch = task.stream("train", 2)[1]
    >>> print(task.vocabulary.decode(batch["inputs"][0]), "|", task.vocabulary.decode(batch["targets"][0]))
    Carrow Point = <eos> <eos> The | Point = <eos> <eos> The lighthouse
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of words.

        Attributes:
          data_dir: folder with a folder for each corpus. If None, the task uses the built-in
            sample.
          corpus: "wikitext-2" or "ud-ewt". WikiText-2 already has `<unk>` for rare words. The
            treebank UD English EWT is read as text with one sentence per line.
          length: L, the number of words in a window.
          vocab_size: maximum size of the vocabulary. If None, the vocabulary has all words of the
            training text.
          backward: whether to add the reversed text, for a bidirectional model.
        """

        data_dir: str | None = None
        corpus: Literal["wikitext-2", "ud-ewt"] = "wikitext-2"
        length: int = 35
        vocab_size: int | None = None
        backward: bool = False

        def __post_init__(self):
            check_fields(self, "words")
            check_at_least(1, "words", length=self.length)
            check_at_least(2, "words", vocab_size=self.vocab_size)

    metric = "perplexity"
    other_metrics = ()

    def __init__(self, config: Config):
        texts = {split: _read(config, split) for split in SPLITS}
        self._keep_digests(config, {split: ["\n".join(text)] for split, text in texts.items()})
        vocabulary = word_level.Vocabulary.build(texts["train"], config.vocab_size)
        fields = {split: _fields(vocabulary, texts[split], config.backward) for split in SPLITS}
        super().__init__(config, vocabulary, fields)

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        self.length(split)
        with np.errstate(over="ignore"):
            return {**metrics, "perplexity": float(np.exp(metrics["loss"]))}

    def codec(self) -> Codec:
        return Codec.of(word_level.Words(self.vocabulary))


def _read(config: Words.Config, split: str) -> list[str]:
    if config.corpus == "wikitext-2":
        return wikitext.words(config.data_dir, split)
    sentences = conllu.read(config.data_dir, split)
    return [word for sentence in sentences for word in (*sentence.words, wikitext.EOS)]


def _fields(
    vocabulary: word_level.Vocabulary, text: list[str], backward: bool
) -> dict[str, np.ndarray]:
    fields: dict[str, np.ndarray] = {}
    numbers = vocabulary.encode([wikitext.EOS, *text])
    for prefix, read in (("", numbers), ("backward_", numbers[::-1]))[: 2 if backward else 1]:
        weights = np.ones(len(text), np.float32)
        columns = {"inputs": read[:-1], "targets": read[1:], "weights": weights}
        fields |= {f"{prefix}{name}": column for name, column in columns.items()}
    return fields
