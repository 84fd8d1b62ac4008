"""Exports into a folder that has one already, and documents that are not as they should be."""

import dataclasses
import json
import socket
from unittest import mock

import pytest
from etils import epath

from cope_jax import tasks
from cope_jax.corpora import document_files, export_sources
from cope_jax.corpora import shards as shards_module
from cope_jax.corpora.export_sources import Corpus, Files
from cope_jax.corpora.shards import Shards
from cope_jax.data import export_folder, shard_export, shard_writer
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError, StorageError
from cope_jax.storage.locks import PARTIAL

BYTES, OPTIONS = Vocabulary("bytes"), Options(length=8, shard_tokens=300)
TEXTS = [f"The {number}th document has {'many ' * number}words." for number in range(40)]


def source(folder, texts=TEXTS, held_out=0.2):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Files(tuple(document_files.find([f"{folder}/*"])), held_out=held_out)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several chunks in a unit."""
    monkeypatch.setattr(shard_writer, "_BATCH", 100)


@pytest.fixture
def written(tmp_path):
    export(source(tmp_path / "in"), tmp_path / "out", BYTES, OPTIONS)
    return tmp_path / "out"


@pytest.mark.parametrize("how", ["missing", "short", "no manifest", "a damaged manifest"])
def test_what_is_missing_is_written_again(how, written, tmp_path):
    before = contents(written)
    files = sorted(written.glob("train-*"))
    assert len(files) > 2
    if "manifest" in how:
        (written / "manifest.json").unlink()
    elif how == "missing":
        files[1].unlink()
    else:
        files[1].write_bytes(files[1].read_bytes()[:-1])
    if how == "a damaged manifest":
        (written / "manifest.json").write_text(
            before["manifest.json"].decode().replace("stream", "streams")
        )
        with pytest.raises(
            ConfigError,
            match=r"changed after the export: restore the file, or delete it and run the ex",
        ):
            export(source(tmp_path / "in"), written, BYTES, OPTIONS)
        (written / "manifest.json").unlink()
    export(source(tmp_path / "in"), written, BYTES, OPTIONS)
    assert contents(written) == before


@pytest.mark.parametrize("begun", [False, True])
def test_a_failed_export_leaves_nothing_that_a_later_one_cannot_use(tmp_path, begun):
    source(tmp_path / "in")
    with (tmp_path / "in/a.jsonl").open("a") as file:
        file.write("\n{")
    wrong = Files(tuple(document_files.find([f"{tmp_path}/in/*"])), held_out=0.2)
    out = tmp_path / "out"
    # Which reads all text before the first shard.
    vocabulary = BYTES if begun else Vocabulary("bpe", size=280)
    with pytest.raises(ConfigError, match=r"line 41 is not a JSON record"):
        export(wrong, out, vocabulary, OPTIONS)
    assert out.exists() == begun == bool(contents(out))
    kept = contents(out)
    with pytest.raises(
        ConfigError,
        match=r"the split 'validation' has no document: give more documents, or raise held_out$",
    ):
        export(source(tmp_path / "few", TEXTS[:1] * 9), tmp_path / "empty", vocabulary, OPTIONS)
    assert not (tmp_path / "empty").exists()
    if begun:
        with pytest.raises(ConfigError, match=r"line 41 is not a JSON record"):
            export(wrong, out, vocabulary, OPTIONS)
        assert contents(out) == kept


def test_a_failed_repair_leaves_what_was_there(tmp_path, monkeypatch):
    options, vocabulary = Options(length=8, shard_tokens=9999), Vocabulary("bpe", size=280)
    written = tmp_path / "out"
    export(source(tmp_path / "in"), written, vocabulary, options)
    whole = contents(written)
    next(written.glob("validation-*")).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(shard_export, "_write_units", mock.Mock(side_effect=ConfigError("line 9")))
        for _ in range(2):
            with pytest.raises(ConfigError, match="line 9"):
                export(source(tmp_path / "in"), written, vocabulary, options)
    kept = contents(written)
    assert {"tokenizer.json", "export.json"} < kept.keys()
    assert sorted(name.split("-")[0] for name in kept if "array" in name) == ["test", "train"]
    export(source(tmp_path / "in"), written, vocabulary, options)
    assert contents(written) == whole


def test_a_claim_without_a_shard_does_not_keep_the_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/export.json").write_text("{}")
    (tmp_path / "out/tokenizer.json").write_text("of the earlier text")
    for name in ("out", "other"):
        export(source(tmp_path / "in"), tmp_path / name, Vocabulary("bpe", size=280), OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_unfinished_files_of_dead_processes_are_removed(written, tmp_path):
    folder = written / f"{PARTIAL}{socket.gethostname()}-x"
    (written / f"{PARTIAL}x").symlink_to(tmp_path / "in")
    for name in ("manifest.json", "none"):  # with the manifest, an export has nothing to write
        folder.mkdir()
        (folder / ".lock").touch()
        (written / name).unlink(missing_ok=True)
        export(source(tmp_path / "in"), written, BYTES, OPTIONS)
        assert not folder.exists() and (tmp_path / "in/a.jsonl").exists()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_failed_export_leaves_no_file_beside_its_tokenizer(is_new, tmp_path):
    export(source(tmp_path / "in"), tmp_path / "first", Vocabulary("bpe", size=280), OPTIONS)
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    text = (tmp_path / "first/tokenizer.json").read_text()
    (given / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<end>"))
    (given / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    if not is_new:
        out.mkdir()
    few = source(tmp_path / "few", TEXTS[:1] * 9)
    with pytest.raises(
        ConfigError,
        match=r"the split 'validation' has no document: give more documents, or raise held_out$",
    ):
        export(few, out, Vocabulary("bpe", str(given)), OPTIONS)
    assert out.exists() != is_new and not contents(out)
    export(source(tmp_path / "in"), out, Vocabulary("bpe", str(given)), OPTIONS)
    assert (out / "tokenizer_config.json").exists()


def test_a_claim_without_a_shard_keeps_no_name_of_an_end_token(tmp_path):
    (tmp_path / "export.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("of the earlier text")
    export_folder.claim(epath.Path(tmp_path), {"length": 8})
    assert [path.name for path in tmp_path.iterdir()] == ["export.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "", "[]", '{"shards": [{}], "sums": {}, "pieces": 1, "last": true}'),
        '{"shards": [], "sums": {}, "pieces": 1, "last": true}',
    ],
)
def test_a_damaged_report_is_one_line(text, written, tmp_path):
    report = sorted((written / "parts").glob("*"))[0]
    report.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"{report.name} is damaged \([^\n]*\): delete it and rerun the command$"
    ):
        export(source(tmp_path / "in"), written, BYTES, OPTIONS)
    identity = json.loads((written / "export.json").read_text())
    # Hides no error by another one.
    export_folder.discard(epath.Path(written), identity, is_new=True)
    assert not report.exists()


def test_an_edited_file_of_the_same_size_is_another_text(written, tmp_path):
    file = tmp_path / "in" / "a.jsonl"
    file.write_text(file.read_text().replace("many", "lots"))
    with pytest.raises(ConfigError, match="contains an export with another listing"):
        edited = Files(tuple(document_files.find([str(file)])), held_out=0.2)
        export(edited, written, BYTES, OPTIONS)


def test_a_damaged_claim_is_one_line(tmp_path):
    (tmp_path / "export.json").write_text("{")
    for look in (export_folder.claim, export_folder.check_claim):
        with pytest.raises(
            ConfigError, match=r"export.json is damaged \([^\n]*\): choose an empty folder$"
        ):
            look(epath.Path(tmp_path), {"length": 8})
    export_folder.discard(epath.Path(tmp_path), {"length": 8}, is_new=True)
    assert (tmp_path / "export.json").exists()


def test_another_given_tokenizer_is_refused(tmp_path):
    for name, size in (("one", 280), ("two", 290)):
        export(source(tmp_path / "in"), tmp_path / name, Vocabulary("bpe", size=size), OPTIONS)
    export(
        source(tmp_path / "in"), tmp_path / "out", Vocabulary("bpe", str(tmp_path / "one")), OPTIONS
    )
    with pytest.raises(ConfigError, match=r"out contains an export with another sha256"):
        export(
            source(tmp_path / "in"),
            tmp_path / "out",
            Vocabulary("bpe", str(tmp_path / "two")),
            OPTIONS,
        )
    with pytest.raises(ConfigError, match=r"there is no tokenizer at .*nowhere"):
        export(
            source(tmp_path / "in"),
            tmp_path / "new",
            Vocabulary("bpe", str(tmp_path / "nowhere")),
            OPTIONS,
        )
    assert not (tmp_path / "new").exists()
    with pytest.raises(
        ConfigError, match="the tokenizer bytes has no vocabulary: set neither vocab nor vocab_size"
    ):
        Vocabulary("bytes", size=300)


def test_a_host_that_starts_at_the_same_time_is_not_refused(tmp_path, monkeypatch):
    """The other host writes its first file between the two looks of this one."""
    ours, looks = source(tmp_path / "in"), []
    export(ours, tmp_path / "out", BYTES, OPTIONS)
    (tmp_path / "new").mkdir()
    exists = type(tmp_path).exists

    def not_yet(path, **options):
        if path.name == "export.json" and not looks:
            looks.append(path)
            (tmp_path / "new/export.json").write_text((tmp_path / "out/export.json").read_text())
            return False
        return exists(path, **options)

    monkeypatch.setattr(type(shard_export.epath.Path(tmp_path)), "exists", not_yet)
    export(ours, tmp_path / "new", BYTES, OPTIONS)
    assert looks and contents(tmp_path / "new") == contents(tmp_path / "out")


@pytest.mark.parametrize("moment", ["train", "write"])
def test_a_host_with_other_flags_stops_the_first(moment, tmp_path, monkeypatch):
    """The other begins while this one learns its vocabulary, or before its first shard."""
    ours, out = source(tmp_path / "in"), tmp_path / "out"
    of, name = (
        (shard_export.loading, "train") if moment == "train" else (shard_writer.Chunk, "write")
    )
    call = getattr(of, name)

    def late(*arguments):
        (out / "export.json").write_text(
            (out / "export.json").read_text().replace('"length": 8', '"length": 9')
        )
        return call(*arguments)

    monkeypatch.setattr(of, name, late)
    with pytest.raises(
        ConfigError,
        match=r"out contains another export by now: choose another folder, and the same fl",
    ):
        export(ours, out, Vocabulary("bpe", size=280), OPTIONS)
    assert not list(out.glob("parts/*.json"))
    assert (out / "tokenizer.json").exists() == (moment == "write") and (
        out / "export.json"
    ).exists()


def test_half_a_character_is_replaced(tmp_path):
    (tmp_path / "in").mkdir()
    lines = ['{"text": "a \\ud800 b"}', *(json.dumps({"text": text}) for text in TEXTS)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines))
    files = Files(tuple(document_files.find([f"{tmp_path}/in/*"])), held_out=0.2)
    assert next(piece.text for _, piece, _ in files.read(0)) == "a ? b"
    export(files, tmp_path / "out", Vocabulary("bpe", size=280), OPTIONS)


def test_packed_parquet_folders_and_long_records_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.parquet.zst").write_bytes(b"x")
    with pytest.raises(
        ConfigError,
        match=r"^a.parquet.zst is packed twice, because Parquet is compressed itself: unpack",
    ):
        document_files.find([f"{tmp_path}/*"])
    with pytest.raises(
        ConfigError,
        match=rf"^no file matches '{tmp_path}': it is a folder, write '{tmp_path}/\*.jsonl'$",
    ):
        document_files.find([str(tmp_path)])
    monkeypatch.setattr(document_files, "_LONGEST", 1 << 20)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * (1 << 20)}))
    file = document_files.find([f"{tmp_path}/b.jsonl"])[0]
    with pytest.raises(
        ConfigError, match=r"b.jsonl, line 1 has at least 1,048,576 bytes: shorten the document$"
    ):
        list(document_files.pieces(file, "text"))


def test_a_vocabulary_is_learned_from_as_many_characters_as_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(export_sources, "_UNIT", 100)
    for texts in (Corpus("tinyshakespeare"), source(tmp_path / "in")):
        assert sum(map(len, shard_export._sample(texts, 600))) == 600


@pytest.mark.parametrize(("window", "opened"), [(10**6, 1), (1, 3)])
def test_shards_of_a_window_stay_open(window, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "_OPEN", 1)
    export(source(tmp_path / "in"), tmp_path / "out", BYTES, Options(length=8, shard_tokens=100))
    shards, openings = Shards(tmp_path / "out", window=window), []
    names = [shard.file for shard in shards.of("train")]
    assert len(names) > 4
    monkeypatch.setattr(shards, "_open", lambda shard: openings.append(shard.file) or object())
    for _ in range(3):
        for shard in shards.of("train"):
            shards._reader(shard)
    assert openings == names * opened


@pytest.mark.parametrize(
    "name", ["../secret", "/{folder}/secret", "..", "a//secret", "a\\secret", 3]
)
def test_a_manifest_and_a_report_name_only_files_of_their_folder(name, written, tmp_path):
    name = name.format(folder=tmp_path) if isinstance(name, str) else name
    manifest = Shards(written).manifest
    secret = tmp_path / "secret"
    secret.write_bytes((written / manifest.shards[0].file).read_bytes())
    foreign = (dataclasses.replace(manifest.shards[0], file=name), *manifest.shards[1:])
    (written / "manifest.json").write_text(dataclasses.replace(manifest, shards=foreign).text)
    with pytest.raises(ConfigError, match="cannot name a file in"):
        Shards(written).take(foreign[0].split, 0)
    report = written / "parts/00000-00000.json"
    content = json.loads(report.read_text())
    content["shards"][0]["file"] = name
    report.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="cannot name a file in"):
        export(source(tmp_path / "in"), written, BYTES, OPTIONS)
    assert secret.exists()


def test_a_manifest_of_another_shape_is_one_line(written):
    content = {"format": shards_module.FORMAT, "counts": [], "shards": {}}
    digest = shards_module._digest(content)
    (written / "manifest.json").write_text(json.dumps({"digest": digest, **content}))
    with pytest.raises(ConfigError, match=r"manifest.json is damaged \([^\n]*again$"):
        Shards(written)


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "a\\b"])
def test_the_path_of_an_export_is_not_a_pattern(name, tmp_path):
    export(source(tmp_path / "other"), tmp_path / "lr1", BYTES, OPTIONS)
    out = tmp_path / name
    export(source(tmp_path / "in" / name), out, BYTES, OPTIONS)
    before = contents(out)
    with pytest.raises(ConfigError, match="contains an export with another"):
        export(source(tmp_path / "in"), out, BYTES, dataclasses.replace(OPTIONS, length=9))
    assert contents(out) == before
    (out / "export.json").unlink()
    with pytest.raises(ConfigError, match="contains other files"):
        export(source(tmp_path / "in"), out, BYTES, OPTIONS)


def llama(folder, *, metaspace=False):
    """A tokenizer that puts a sign before each text, as Llama 2 does. Its file is in the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abct"]
    library = Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    ends = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    library.decoder = decoders.Sequence(ends)
    library.add_special_tokens([AddedToken("</s>", special=True)])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return Vocabulary("bpe", str(folder))


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_long_text_has_its_own_tokens_and_bytes(metaspace, tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "PIECE", 64)
    monkeypatch.setattr(document_files, "_AFTER", 32)
    (tmp_path / "in").mkdir()
    texts = [("cat bat\n" + "a cat " * n) * 20 for n in range(1, 25)]
    for number, text in enumerate(texts):
        (tmp_path / f"in/{number}.txt").write_text(text)
    files = Files(tuple(document_files.find([f"{tmp_path}/in/*"])), held_out=0.2)
    pieces = sum(
        1
        for unit in range(len(files.units))
        for _ in files.read(unit, lambda left, right: right[0] == " ")
    )
    manifest = export(
        files, tmp_path / "out", llama(tmp_path / "llama", metaspace=metaspace), Options(length=8)
    )
    reports = [json.loads(path.read_text()) for path in (tmp_path / "out/parts").glob("*.json")]
    assert (
        sum(report["pieces"] for report in reports)
        == (pieces if metaspace else len(texts))
        > len(texts) * metaspace
    )
    counts = manifest.counts.values()
    assert sum(count.tokens for count in counts) == sum(1 + len(text) for text in texts)
    assert sum(count.bytes for count in counts) == sum(map(len, texts))
    assert not any(count.left_out for count in counts) and '"changed"' not in manifest.text


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_texts_that_do_not_come_back_are_counted(tmp_path, kind):
    texts = [*TEXTS, *(f"a▁b  {n}" for n in range(20))]
    vocabulary = Vocabulary("words") if kind == "words" else llama(tmp_path / "llama")
    manifest = export(source(tmp_path / "in", texts), tmp_path / "out", vocabulary, OPTIONS)
    changed = sum(counts.changed for counts in manifest.counts.values())
    # Numbers are unknown words in validation and test.
    assert changed == 20 if kind == "bpe" else changed > 20
    task = tasks.create("sharded_text", folders=(str(tmp_path / "out"),), length=8, tokenizer=kind)
    assert task.counts("train").changed == manifest.counts["train"].changed > 0
    assert "bits_per_byte" not in task.reported_metrics("train", {"loss": 1.0})
    assert "; no " in task.origin() and shards_module.read_manifest(tmp_path / "out") == manifest
    assert (
        task._parts[0].manifest.digest
        == json.loads((tmp_path / "out/manifest.json").read_text())["digest"]
    )


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch):
    from array_record.python import array_record_module

    class Full:
        def __init__(self, path, options):
            self._path = path

        def write(self, record):
            del record

        def close(self):
            raise RuntimeError(
                f"write() failed: No space left on device; writing {self._path}; at byte 606208"
            )

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            StorageError,
            match=r"^cannot write to .*out \(No space left on device\): complete files are intact; free",
        ),
    ):
        patch.setattr(array_record_module, "ArrayRecordWriter", Full)
        export(source(tmp_path / "in"), tmp_path / "out", BYTES, OPTIONS)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == [
        "export.json",
        "parts",
        "tokenizer.json",
    ]
    export(source(tmp_path / "in"), tmp_path / "out", BYTES, OPTIONS)
