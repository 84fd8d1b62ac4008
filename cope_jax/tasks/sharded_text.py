"""Language modelling of tokenised corpora of any size, which `cope-jax export` wrote."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.packing import Packing, TokenStream
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import Shards, read_manifest
from cope_jax.corpora.text_units import Counts
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields
from cope_jax.storage.files import in_bucket, read_object
from cope_jax.tasks.stored import Blocks, TextTask
from cope_jax.tasks.task import TASKS, Batch, check
from cope_jax.tokenizers import loading

_NO_FOLDER = "sharded_text.folders is empty: name the folders that `cope-jax export` wrote"


@TASKS.register("sharded_text")
class ShardedText(TextTask):
    r"""Predicts every token of text that is stored as packed examples: see
    `cope_jax.corpora.shards`.

    The fields are those of the task `text`: `inputs`, `targets` and `weights` `[B, L]`, and with
    the packing "documents" also `segments` and `positions`. No split is held in memory. Training
    reads the shards in a random order and shuffles within windows of examples; each process reads
    only its rows of a batch. The order depends only on the seed, and resuming needs only the number
    of the batch.

    With several folders, each training example comes from one of them, by weight. The other splits
    contain the examples of all folders, interleaved evenly, so that a few examples represent all
    of them.

    The headline metric is the perplexity per word if every folder was made from a corpus with an
    agreed division into words, and else the perplexity per token.

    >>> import tempfile
    >>> from cope_jax.corpora.export_sources import Corpus
    >>> from cope_jax.data.shard_export import Options, Vocabulary, export
    >>> folder = tempfile.mkdtemp()
    >>> manifest = export(Corpus("wikitext-2"), folder, Vocabulary("bytes"), Options(length=40))
    >>> task = ShardedText(ShardedText.Config(folders=(folder,), length=40))
    >>> task.decode(task.dataset("train", 1)["inputs"][0])
    '<|endoftext|> \n = The Lighthouse at Carrow Point = \n'
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of sharded_text.

        Attributes:
          folders: the folders of shards, on disk or in a bucket, such as `gs://bucket/corpus`.
          weights: the share of training examples from each folder; () means the same share.
          length: L, the number of tokens of an example, which the export decided.
          tokenizer: the kind of the tokenizer, which the export decided: "bpe", "words" or "bytes".
          vocab: path of the tokenizer. None means the tokenizer in the first folder.
          vocab_multiple: V is rounded up to a multiple of this number, so that several devices can
            share tables of V rows. The additional tokens never occur.
          window: number of examples that training shuffles at a time. A larger window mixes more,
            and needs more shards open at a time.
        """

        folders: tuple[str, ...] = ()
        weights: tuple[float, ...] = ()
        length: int = 128
        tokenizer: loading.Kind = "bytes"
        vocab: str | None = None
        vocab_multiple: int = 1
        window: int = 16_384

        def __post_init__(self):
            check_fields(self, "sharded_text")
            sizes = {"length": self.length, "window": self.window}
            check_at_least(1, "sharded_text", **sizes, vocab_multiple=self.vocab_multiple)
            folders, weights = len(self.folders), len(self.weights)
            check(
                not weights or weights == folders,
                f"sharded_text.weights has {weights} numbers for {folders} folders: give one for each",
            )
            for folder in self.folders:
                in_bucket(folder)  # an error names another kind of URL
            check(
                all(0 < weight < float("inf") for weight in self.weights),
                f"sharded_text.weights={self.weights} must be positive numbers",
            )
            check(
                len(set(self.folders)) == len(self.folders),
                "sharded_text.folders names a folder twice: name each once",
            )

    packable = True

    def __init__(self, config: Config):
        vocab = config.vocab or next(iter(config.folders), None)
        if vocab is None and config.tokenizer != "bytes":
            raise ConfigError(_NO_FOLDER)
        if config.vocab is None and config.folders:
            # An error names the folder, and not a missing tokenizer.
            read_manifest(config.folders[0])
        self.tokenizer = loading.load(config.tokenizer, vocab or "")
        self.window_length = config.length
        self._orders: dict[str, np.ndarray] = {}
        size = -(-len(self.tokenizer) // config.vocab_multiple) * config.vocab_multiple
        super().__init__(config, vocab_size=size, lengths=dict.fromkeys(SPLITS, config.length))

    @functools.cached_property
    def _parts(self) -> list[Shards]:
        """The folders, read on first use, because a run works without them."""
        if not self.config.folders:
            raise ConfigError(_NO_FOLDER)
        shards = [Shards(folder, window=self.config.window) for folder in self.config.folders]
        digest = hashlib.sha256(self.tokenizer.text.encode()).hexdigest()
        for folder, manifest in (
            (folder_shards.folder, folder_shards.manifest) for folder_shards in shards
        ):
            if (manifest.length, manifest.tokenizer) != (self.config.length, self.config.tokenizer):
                made = f"length={manifest.length} and task.options.tokenizer={manifest.tokenizer}"
                raise ConfigError(f"{folder} has other examples: set task.options.{made}")
            if manifest.tokenizer_sha256 != digest:
                given = self.config.vocab or self.config.folders[0]
                if given == folder:
                    raise ConfigError(
                        f"{folder}/{self.tokenizer.file} was changed after the export: restore the file"
                    )
                raise ConfigError(
                    f"{folder} was made with another tokenizer than {given}: export it again with --vocab={given}"
                )
            if manifest.packing != shards[0].manifest.packing:
                other = f"{manifest.packing!r}, unlike {shards[0].folder}"
                raise ConfigError(f"{folder} has the packing {other}: leave one of them out")
        return shards

    @property
    def packing(self) -> Packing:
        """The packing of the examples: "stream" or "documents"."""
        return self._parts[0].manifest.packing

    @property
    def crosses_documents(self) -> bool:  # type: ignore[override]  # an attribute of other tasks
        return self.packing == "stream"

    @functools.cached_property
    def metric(self) -> str:
        known = all(shards.manifest.words for shards in self._parts)
        unknown = any(self.counts(split).unknown for split in self.evaluation_splits)
        return "perplexity" if known and not unknown else "token_perplexity"

    def size(self, split: str) -> int:
        self.length(split)
        return sum(shards.size(split) for shards in self._parts)

    def mixture(self, split: str) -> tuple[tuple[float, range], ...]:
        self.length(split)
        if len(self.config.folders) == 1 or split != "train":
            return ()
        weights = self.config.weights or (1.0,) * len(self.config.folders)
        ends = [0, *itertools.accumulate(shards.size(split) for shards in self._parts)]
        ranges = (range(*end) for end in itertools.pairwise(ends))
        return tuple(zip(weights, ranges, strict=True))

    def blocks(self, split: str) -> Blocks:
        ranges, start = [], 0
        for shards in self._parts:
            ranges += [range(start + r.start, start + r.stop) for r in shards.ranges(split)]
            start += shards.size(split)
        return Blocks(ranges, self.config.window)

    def take(self, split: str, indices: np.ndarray) -> Batch:
        size = self.size(split)
        mixed = split != "train" and len(self._parts) > 1
        order = self._interleaved(split) if mixed else range(size)
        rows = []
        for index in np.asarray(indices).tolist():
            if not 0 <= index < size:
                raise ConfigError(
                    f"there is no example {index}: give an index of at least 0 and less than {size}"
                )
            index = int(order[index])
            for shards in self._parts:
                if index < shards.size(split):
                    rows.append(shards.take(split, index))
                    break
                index -= shards.size(split)
        names: tuple[str, ...] = ("inputs", "targets", "weights")
        names += () if self.crosses_documents else ("segments", "positions")
        if not rows:
            blank = self._parts[0].take(split, 0)
            return {name: blank[name][None][:0] for name in names}
        return {name: np.stack([row[name] for row in rows]) for name in names}

    def _interleaved(self, split: str) -> np.ndarray:
        """An even order of the examples of all folders, which are numbered folder by folder."""
        if split not in self._orders:
            sizes = (shards.size(split) for shards in self._parts)
            places = [(np.arange(size) + 0.5) / size for size in sizes]
            self._orders[split] = np.argsort(np.concatenate(places), kind="stable")
        return self._orders[split]

    def counts(self, split: str) -> Counts:
        self.length(split)
        counts = [dataclasses.astuple(shards.manifest.counts[split]) for shards in self._parts]
        return Counts(*map(sum, zip(*counts, strict=True)))

    def token_streams(self, split: str) -> list[TokenStream]:
        """The text of each shard of a split, which is read into memory."""
        return [shards.stream(shard) for shards in self._parts for shard in shards.of(split)]

    def origin(self) -> str:
        size = f"{self.counts('train').tokens:,} tokens to train on, from {' and '.join(self.config.folders)}"
        return "; ".join(filter(None, (size, self.left_out())))

    def data_digest(self) -> dict[str, str]:
        return {self._SOURCES: json.dumps(self._digests(), indent=1) + "\n"}

    def same_data(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        del splits  # one digest is of all splits
        file = epath.Path(folder) / self._SOURCES
        if not file.exists():
            return None
        return bool(read_object(file, "delete it to skip this check") == self._digests())

    def example_options(self) -> dict[str, Any]:
        options: Mapping[str, Any] = super().example_options()
        carried = ("folders", "vocab", "window")
        return {name: value for name, value in options.items() if name not in carried}

    def _digests(self) -> dict[str, Any]:
        return {"manifests": [shards.manifest.digest for shards in self._parts]}
