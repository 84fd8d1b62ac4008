import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_jax import tasks
from cope_jax.corpora import document_files, export_sources
from cope_jax.corpora.export_sources import Corpus, Files
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import Shards, read_manifest
from cope_jax.data import pipeline, shard_writer
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError
from cope_jax.tokenizers import loading

BYTES = Vocabulary("bytes")


def records(folder, shard):
    return (reader := ArrayRecordReader(f"{folder}/{shard.file}")).read(
        [*range(reader.num_records())]
    )


def parse(record, width):
    """A record's pieces, (entry, begins a document, inputs, targets), and its idle targets."""
    number = itertools.count()

    def uint32():
        return struct.unpack_from("<I", record, 4 * next(number))[0]

    pieces, idle = uint32(), uint32()
    starts = [uint32() for _ in range(pieces)]
    sizes = [uint32() for _ in range(pieces)]
    idle = [uint32() for _ in range(idle)]
    offset, entries = 4 * next(number), []
    for start, size in zip(starts, sizes, strict=True):
        tokens = []
        for _ in range(size % 2**31 + 1):
            tokens.append(int.from_bytes(record[offset : offset + width], "little"))
            offset += width
        entries.append((start, size >= 2**31, tokens[:-1], tokens[1:]))
    assert offset == len(record)
    return entries, idle


def write_web(folder, texts, files=3):
    folder.mkdir(exist_ok=True)
    for number in range(files):
        (folder / f"{number}.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in texts[number::files])
        )
    return f"{folder}/*.jsonl"


def web(folder, texts, held_out=0.2, files=3):
    return Files(tuple(document_files.find([write_web(folder, texts, files)])), held_out=held_out)


TEXTS = [f"Document {n} says {'so ' * (n % 13)}much.\n" for n in range(60)]


def contents(folder):
    """Every file of a folder but the reports of its parts."""
    return {
        path.name: path.read_bytes()
        for path in sorted(pathlib.Path(folder).iterdir())
        if path.is_file()
    }


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_a_corpus_has_the_examples_of_the_task_text(tmp_path, kind, packing):
    export(
        Corpus("wikitext-2"),
        tmp_path,
        Vocabulary(kind, size=300 if kind == "bpe" else None),
        Options(16, packing),
    )
    task = tasks.create("sharded_text", folders=(str(tmp_path),), length=16, tokenizer=kind)
    vocab = str(tmp_path / loading.FILES[kind])
    text = tasks.create("text", length=16, tokenizer=kind, packing=packing, vocab=vocab)
    assert task.metric == text.metric == ("token_" if kind == "words" else "") + "perplexity"
    for split in SPLITS:
        assert task.size(split) == text.size(split)
        assert task.counts(split) == text.counts(split)
        ours, theirs = (source.take(split, np.arange(text.size(split))) for source in (task, text))
        assert ours.keys() == theirs.keys()
        for name, rows in theirs.items():
            np.testing.assert_array_equal(ours[name], rows, strict=True, err_msg=name)
        (entries,) = task.token_streams(split)
        (wanted,) = text.token_streams(split)
        np.testing.assert_array_equal(entries.tokens, wanted.tokens)
        bounds = wanted.bounds if packing == "documents" else wanted.bounds[[0, -1]]
        np.testing.assert_array_equal(entries.bounds, bounds)
        np.testing.assert_array_equal(entries.counted, wanted.counted | (split == "train"))


@pytest.mark.parametrize("name", ["3*wikitext-2+code", "wikitext-2 + code", "2*code"])
def test_a_mixture_is_refused_because_shards_have_no_weights(name):
    with pytest.raises(
        ConfigError,
        match=r"is a mixture: export each corpus to a folder, and mix the folders by task",
    ):
        Corpus(name)


def test_a_corpus_goes_to_processes_without_its_text():
    source = Corpus("wikitext-2")
    source.describe()  # reads the text
    sent = pickle.dumps(source)
    assert len(sent) < 200 and pickle.loads(sent) == source


@pytest.mark.parametrize("width", [2, 4])
def test_records_are_as_described(tmp_path, monkeypatch, width):
    if width == 4:
        monkeypatch.setattr(loading.Bytes, "__len__", lambda self: 70_000)
    manifest = export(
        web(tmp_path / "in", TEXTS),
        tmp_path / "out",
        BYTES,
        Options(length=32, packing="documents"),
    )
    for shard in manifest.shards:
        assert (
            shard.sha256 == hashlib.sha256((tmp_path / "out" / shard.file).read_bytes()).hexdigest()
        )
        documents_of = collections.defaultdict(dict)
        for record in records(tmp_path / "out", shard):
            pieces, idle = parse(record, width)
            assert sum(len(inputs) for _, _, inputs, _ in pieces) <= 32
            targets = [target for piece in pieces for target in piece[3]]
            ends = [index for index, target in enumerate(targets) if target == 256]
            assert idle == ([] if shard.split == "train" else ends)
            for start, first, inputs, targets in pieces:
                assert first == (inputs[0] == 256)
                documents_of[start] = targets
        text = [token for start in sorted(documents_of) for token in documents_of[start]]
        assert sorted(documents_of)[0] == 0
        assert len(text) == shard.entries


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30, unique=True),
    packing=st.sampled_from(["stream", "documents"]),
    shard_tokens=st.integers(1, 200),
    length=st.integers(1, 20),
)
def test_no_document_is_lost_or_repeated(tmp_path_factory, texts, packing, shard_tokens, length):
    folder = tmp_path_factory.mktemp("export")
    named = {split: [f"{split}: {text}" for text in texts] for split in SPLITS}  # none is empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_files, "split_of", lambda key, held_out: key.split(":")[0])
        patch.setattr(shard_writer, "_BATCH", 50)
        source = web(folder / "in", [*itertools.chain(*named.values())])
        export(source, folder / "out", BYTES, Options(length, packing, shard_tokens))
    task = tasks.create("sharded_text", folders=(str(folder / "out"),), length=length)
    for split in SPLITS:
        documents = []
        for entries in task.token_streams(split):
            ends = np.flatnonzero(entries.tokens[1:] == 256)
            documents += [
                bytes(row[row != 256].tolist()).decode()
                for row in np.split(entries.tokens[1:], ends + 1)
            ]
        assert sorted(filter(None, documents)) == sorted(named[split])
        batch = task.take(split, np.arange(task.size(split)))
        said = batch["targets"][batch["weights"] == 1]
        assert collections.Counter(said[said != 256].tolist()) == collections.Counter(
            "".join(named[split]).encode()
        )


@pytest.fixture
def small(monkeypatch):
    """Several units, and several chunks in a unit."""
    monkeypatch.setattr(export_sources, "_UNIT", 100)
    monkeypatch.setattr(shard_writer, "_BATCH", 100)
    return Options(length=8, shard_tokens=200)


def test_parts_and_an_interrupted_export_write_the_same_files(tmp_path, small, monkeypatch):
    source = web(tmp_path / "in", TEXTS)
    vocabulary = Vocabulary("bpe", size=300)
    assert len(source.weights) == 3
    export(source, tmp_path / "whole", vocabulary, small)
    assert len(list((tmp_path / "whole").glob("train-00001-*"))) > 1
    for index in (2, 0, 1):
        assert not (tmp_path / "parts/manifest.json").exists()
        manifest = export(source, tmp_path / "parts", vocabulary, small, host=(index, 3))
    assert manifest == read_manifest(tmp_path / "whole")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    class Killed(BaseException):
        pass

    calls = itertools.count(1)

    def write_file(*file):
        if next(calls) % 2 == 0:
            raise Killed
        shard_writer.write_file(*file)

    monkeypatch.setattr("cope_jax.data.shard_export.write_file", write_file)
    kills = 0
    while not (tmp_path / "killed/manifest.json").exists():
        try:
            export(source, tmp_path / "killed", vocabulary, small)
        except Killed:
            kills += 1
            (tmp_path / "killed/.partial-x").mkdir(parents=True, exist_ok=True)
            os.utime(tmp_path / "killed/.partial-x", (0, 0))
            (tmp_path / "killed/.partial-of-another").mkdir(parents=True, exist_ok=True)
    assert kills > 5
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert (
        not (tmp_path / "killed/.partial-x").exists()
        and (tmp_path / "killed/.partial-of-another").exists()
    )


@pytest.mark.slow
def test_processes_that_are_killed_write_the_same_files(tmp_path):
    pattern = write_web(tmp_path / "in", TEXTS * 4000, files=24)
    flags = [
        f"--input={pattern}",
        "--tokenizer=bpe",
        "--vocab_size=400",
        "--length=64",
        "--shard_tokens=200000",
        "--held_out=0.1",
    ]
    command = [sys.executable, "-m", "cope_jax", "export", *flags]
    subprocess.run([*command, f"--out={tmp_path}/whole", "--workers=1"], check=True)
    rng = np.random.default_rng(0)
    kills = 0
    while kills < 10:
        process = subprocess.Popen(
            [*command, f"--out={tmp_path}/killed", "--workers=2"], stderr=subprocess.DEVNULL
        )
        try:
            assert process.wait(rng.uniform(1, 6)) == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    subprocess.run([*command, f"--out={tmp_path}/killed", "--workers=2"], check=True)
    assert kills
    time.sleep(2)  # processes of killed commands notice that they are alone
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "killed").rglob(".*")] == []


def test_another_export_is_refused(tmp_path, small):
    source = web(tmp_path / "in", TEXTS)
    export(source, tmp_path / "out", BYTES, small)
    for other, message in [
        (
            (source, BYTES, Options(length=9)),
            r"an export with another length \(8, not 9\): delete the folder, or",
        ),
        ((source, Vocabulary("bpe"), small), r"an export with another kind \(bytes, not bpe\)"),
        (
            (web(tmp_path / "in2", TEXTS[:-1]), BYTES, small),
            r"an export with another bytes \(\d+, not \d+\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(other[0], tmp_path / "out", *other[1:])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="full contains other files: choose an empty folder"):
        export(source, tmp_path / "full", BYTES, small)
    with pytest.raises(
        ConfigError,
        match="the split 'validation' has no document: give more documents, or raise held",
    ):
        export(web(tmp_path / "in", TEXTS, held_out=1e-9), tmp_path / "few", BYTES, small)
    (tmp_path / "prose.txt").write_text("one document")
    prose = Files(tuple(document_files.find([f"{tmp_path}/prose.txt"])), held_out=1e-9)
    with pytest.raises(
        ConfigError, match=r"so set --split_documents=.*, or give more files, or raise held_out$"
    ):
        export(prose, tmp_path / "few", BYTES, small)
    with pytest.raises(
        ConfigError, match="no file of text can be split by line: leave split_documents out"
    ):
        dataclasses.replace(source, division="line")
    with pytest.raises(
        ConfigError, match=r"held_out must be more than 0 and less than 0.5, got 0.5"
    ):
        web(tmp_path / "in", TEXTS, held_out=0.5)


def test_equal_documents_are_in_one_split(tmp_path, small):
    export(web(tmp_path / "in", TEXTS * 3), tmp_path / "out", BYTES, small)
    seen = {}
    shards = Shards(tmp_path / "out")
    for split in SPLITS:
        tokens = np.concatenate([shards.stream(shard).tokens[1:] for shard in shards.of(split)])
        seen[split] = set("".join(map(chr, tokens)).split("\u0100"))
    assert seen["train"] & seen["test"] == {""}
    assert len(seen["train"] | seen["validation"] | seen["test"]) == len(TEXTS) + 1


@pytest.fixture
def written(tmp_path, small):
    export(web(tmp_path / "in", TEXTS), tmp_path / "out", BYTES, small)
    return tmp_path / "out"


def create(*folders, **options):
    return tasks.create("sharded_text", folders=tuple(map(str, folders)), length=8, **options)


def test_damage_is_one_line_with_the_file(written):
    task = create(written)
    shard = read_manifest(written).shards[1]
    path = written / shard.file
    whole = path.read_bytes()
    index = read_manifest(written).shards[0].examples  # the first of the shard
    path.write_bytes(whole[:-1])
    short = rf"{shard.file} has {shard.size - 1} bytes, not {shard.size}: run the export again$"
    with pytest.raises(ConfigError, match=short):
        task.take("train", np.array([index]))
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(
        ConfigError,
        match=rf"{shard.file} was changed or damaged: delete it and run the export again$",
    ):
        task.take("train", np.array([index]))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.file} is missing: run the export again$"):
        task.take("train", np.array([index]))
    path.write_bytes(whole)
    task.take("train", np.array([index]))
    with pytest.raises(
        ConfigError, match=r"there is no example -1: give an index of at least 0 and less than"
    ):
        task.take("train", np.array([-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text[:-20],
            r"manifest.json is damaged \(.*\): write it with `cope-jax export` again$",
        ),
        (
            lambda text: "[]",
            r"manifest.json is damaged \(it must contain a JSON object, not a list\): write it",
        ),
        (lambda text: "7", r"manifest.json is damaged"),
        (
            lambda text: text.replace('"length": 8', '"length": 9'),
            r"manifest.json was changed after the export: restore",
        ),
        (
            lambda text: text.replace('"format": 1', '"format": 2'),
            r"manifest.json has format 2, not 1",
        ),
    ],
)
def test_a_wrong_manifest_is_one_line(written, change, message):
    path = written / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=message):
        create(written).size("train")


def test_folders_that_do_not_fit_are_one_line(written, tmp_path, small):
    with pytest.raises(
        ConfigError,
        match=r"out has other examples: set task.options.length=8 and task.options.token",
    ):
        tasks.create("sharded_text", folders=(str(written),), length=9).size("train")
    with pytest.raises(ConfigError, match=r"sharded_text.folders is empty: name the folders that"):
        tasks.create("sharded_text").size("train")
    with pytest.raises(ConfigError, match=r"sharded_text.folders is empty: name the folders that"):
        tasks.create("sharded_text", tokenizer="bpe")
    (written / "manifest.json").unlink()
    with pytest.raises(
        ConfigError, match=r"out has no manifest.json yet: run its export again, which continues$"
    ):
        create(written).size("train")
    with pytest.raises(
        ConfigError, match=r"none has no manifest.json: write it with `cope-jax export`$"
    ):
        create(tmp_path / "none").size("train")
    for name, size in (("one", 300), ("two", 301)):
        export(web(tmp_path / "in", TEXTS), tmp_path / name, Vocabulary("bpe", size=size), small)
    with pytest.raises(
        ConfigError,
        match=r"two was made with another tokenizer than (.*one): export it again with --vocab=\1$",
    ):
        create(tmp_path / "one", tmp_path / "two", tokenizer="bpe").size("train")
    with pytest.raises(
        ConfigError, match=r"sharded_text.weights has 1 numbers for 2 folders: give one for each"
    ):
        create("a", "b", weights=(1.0,))
    with pytest.raises(ConfigError, match=r"sharded_text.folders names a folder twice"):
        create("a", "a")


def test_an_epoch_has_every_example_once_and_windows_lie_in_few_shards():
    blocks = [range(100 * n, 100 * n + 50 + n) for n in range(20)]
    size = sum(map(len, blocks))
    order = pipeline.WindowOrder(blocks, window=64, seed=3)
    epochs = [[order[e * size + i] for i in range(size)] for e in range(3)]
    assert all(sorted(epoch) == sorted(itertools.chain(*blocks)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [pipeline.WindowOrder(blocks, window=64, seed=4)[i] for i in range(size)]
    for start in range(0, size, 64):
        assert len({index // 100 for index in epochs[1][start : start + 64]}) <= 3
    assert len({index // 100 for index in epochs[1][:640:64]}) > 5
    assert [order[i] for i in reversed(range(size))][::-1] == epochs[0]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_reads_the_same_order(written, tmp_path, small, processes):
    export(web(tmp_path / "in2", TEXTS[:30]), tmp_path / "other", BYTES, small)
    options = {"weights": (3.0, 1.0), "window": 32}
    settings = {"batch_size": 8, "examples": None, "data_seed": 0, "shuffle_seed": 1}
    task = create(written, tmp_path / "other", **options)
    whole = pipeline.train_iterator(task, **settings)
    wanted = [next(whole) for _ in range(40)]
    shares = np.split(np.arange(8), processes)
    parts = [pipeline.train_iterator(task, rows=rows, **settings) for rows in shares]
    for number, batch in enumerate(wanted):
        if number == 20:  # resume, from a state of a few bytes that does not depend on the rows
            states = [iterator.get_state() for iterator in parts]
            assert all(state == states[0] for state in states) and len(json.dumps(states[0])) < 300
            parts = [
                pipeline.train_iterator(task, rows=rows, **settings) for rows in reversed(shares)
            ][::-1]
            for iterator in parts:
                iterator.set_state(states[0])
        batches = [next(iterator) for iterator in parts]
        for name, rows in batch.items():
            np.testing.assert_array_equal(
                np.concatenate([iterator[name] for iterator in batches]), rows
            )


def test_a_mixture_is_drawn_by_weight(written, tmp_path, small):
    export(
        web(tmp_path / "in2", ["other " * 5 + str(n) for n in range(60)]),
        tmp_path / "other",
        BYTES,
        small,
    )
    task = create(written, tmp_path / "other", weights=(3.0, 1.0))
    (_, first), (_, second) = task.mixture("train")
    assert first.stop == second.start == len(first)
    other = {row.tobytes() for row in task.take("train", np.array(second))["inputs"]}
    batches = pipeline.train_iterator(
        task, batch_size=8, examples=None, data_seed=0, shuffle_seed=0
    )
    drawn = np.concatenate([next(batches)["inputs"] for _ in range(50)])
    assert np.mean([row.tobytes() in other for row in drawn]) == pytest.approx(1 / 4, abs=0.02)
