"""The C++ library is compiled once and checked; whatever fails is one line, and attention runs in
XLA.
"""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend, full_attention, prepare
from cope_jax.attention.kernels.cpu import cpp_attention, library
from cope_jax.errors import ConfigError
from tests.attention.test_generated import native as native
from tests.attention.test_generated import why_not


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in for the compiler, which takes half a second and writes a line to `log` for each
    compilation.
    """
    script = tmp_path / "c++"
    script.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        case "$*" in *-dM*) cat {tmp_path}/macros; exit 0;; esac
        echo compiled >> {tmp_path}/log
        sleep 0.5
        for last; do :; done
        echo library > "$last"
        """)
    )
    script.chmod(0o755)
    (tmp_path / "macros").write_text("#define __AVX2__ 1")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def times_compiled(compiler):
    log = compiler.with_name("log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_it_is_compiled_once_and_again_if_damaged_or_for_another_cpu(compiler, monkeypatch, caplog):
    path = library._compiled()
    assert library._compiled() == path and path.read_text() == "library\n"
    assert times_compiled(compiler) == 1 and not caplog.messages
    library._announce.cache_clear()
    monkeypatch.setattr(library, "QUIET", 0.1)  # it takes half a second
    path.write_text("lib")
    assert library._compiled() == path and path.read_text() == "library\n"
    assert times_compiled(compiler) == 2
    compiler.with_name("macros").write_text("#define __AVX2__ 1\n#define __AVX512F__ 1")
    assert library._compiled() != path
    assert times_compiled(compiler) == 3
    assert caplog.messages == [f"attention: compiling a kernel in C++, kept in {path.parent}"]
    compiler.with_name("macros").write_text("#define __ARM_NEON 1")
    library._compiled()
    assert times_compiled(compiler) == 4
    compiler.with_name("macros").write_text("#define __SSE2__ 1")
    with pytest.raises(library.Unavailable, match="the CPU has neither AVX2 nor NEON"):
        library._compiled()


def test_a_check_that_takes_long_is_said(monkeypatch, tmp_path, caplog):
    library._announce.cache_clear()
    monkeypatch.setattr(library, "QUIET", 0.1)
    monkeypatch.setattr(library, "_fault", lambda path: time.sleep(0.5) or "")
    library._check(tmp_path / "attention.so")
    assert caplog.messages == [f"attention: compiling a kernel in C++, kept in {tmp_path}"]


@pytest.mark.slow
def test_of_several_processes_one_compiles_and_the_others_wait(compiler):
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=library._compiled) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert times_compiled(compiler) == 1


@pytest.mark.slow
def test_a_killed_compilation_leaves_nothing_that_hinders_the_next(compiler):
    command = [
        sys.executable,
        "-c",
        "from cope_jax.attention.kernels.cpu import library; library._compiled()",
    ]
    process = subprocess.Popen(command, start_new_session=True)
    end = time.monotonic() + 60
    while not times_compiled(compiler) and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait()
    assert library._compiled().read_text() == "library\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda script, monkeypatch: monkeypatch.setenv("CXX", "no-such-compiler"),
            "CXX='no-such-compiler' is not found: install g++ or clang++, or set CXX",
        ),
        (lambda script, monkeypatch: monkeypatch.setenv("CXX", 'g++ "-O2'), "cannot be read"),
        (lambda script, monkeypatch: script.write_text("#!/bin/sh\nexit 3"), "c++ failed"),
        (
            lambda script, monkeypatch: script.write_text(
                "#!/bin/sh\necho 'a.cc:1: error: too old' >&2; exit 1"
            ),
            "a.cc:1: error: too old",
        ),
        (
            lambda script, monkeypatch: script.with_name("cache").write_text("a file"),
            "Not a directory",
        ),
        (
            lambda script, monkeypatch: monkeypatch.setattr(library, "SECONDS", 0.2),
            "took longer than 0.2 seconds",
        ),
        (lambda script, monkeypatch: None, "file too short"),
    ],
    ids=["no compiler", "a quote", "failing", "too old", "no cache", "slow", "not a library"],
)
def test_whatever_fails_is_one_line_and_attention_goes_on(change, reason, compiler, monkeypatch):
    library._load.cache_clear()
    monkeypatch.setenv(library.SETTING, "1")
    change(compiler, monkeypatch)
    try:
        computed = library.why_not()
        assert "\n" not in computed
        assert reason in computed
        encoding = encodings.create("cope", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
        assert np.isfinite(attend(x, x, x, encoding=encoding)).all()
        monkeypatch.setenv(library.SETTING, "required")
        with pytest.raises(ConfigError, match="COPE_JAX_NATIVE=required, but the C"):
            library.why_not()
    finally:
        library._load.cache_clear()


def test_the_setting(monkeypatch):
    monkeypatch.setenv(library.SETTING, "0")
    assert library.why_not() == "COPE_JAX_NATIVE is 0"
    monkeypatch.setenv(library.SETTING, "yes")
    with pytest.raises(
        ConfigError, match="COPE_JAX_NATIVE='yes' is unknown: choose from 0, 1, required"
    ):
        library.why_not()


@pytest.mark.parametrize(("allowed", "right"), [(True, True), (True, False), (False, None)])
def test_a_matrix_unit_that_multiplies_wrong_is_not_used(allowed, right, compiler, monkeypatch):
    answers = {"allow_tiles": allowed, "tiles_agree": right}
    monkeypatch.setattr(library, "_symbol", lambda path, name: answers[name])
    assert library.has_tiles.__wrapped__() is bool(allowed and right)


@pytest.mark.usefixtures("native")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("s/exp_of(/tanh_of(/", "gives wrong numbers"),
        ("s/^static void plain.*/&__builtin_trap();/", "fails at a small problem, with status -"),
    ],
)
def test_a_compiler_with_a_fault_is_not_used(fault, reason, tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\nfor file; do case "$file" in */kernel.cc) sed -i "{fault}" "$file";; esac; done\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._load.cache_clear()
    try:
        for _ in range(2):
            assert reason in library.why_not()
            library._load.cache_clear()
    finally:
        library._load.cache_clear()


def test_a_check_that_could_not_be_made_is_made_again(tmp_path, monkeypatch):
    answers = iter([(1, b"...\nOSError: No space left on device"), (0, b"")])

    def run(command, env, **_):
        assert env["JAX_TRACEBACK_FILTERING"] == "off"  # else the last line is about the filter
        status, err = next(answers)
        return subprocess.CompletedProcess(command, status, stderr=err)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(library.Unavailable, match=r"small problem.*: OSError: No space"):
        library._check(tmp_path / "attention.so")
    library._check(tmp_path / "attention.so")
    library._check(tmp_path / "attention.so")  # its verdict is known


def plant(path):
    """Writes what another user would put next to the library's name, with its digest."""
    path.write_text("planted")
    path.with_suffix(".sha256").write_text(library._digest(b"planted"))


@pytest.mark.parametrize("level", ["", "cope_jax"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_what_others_could_have_put_there_is_not_loaded(level, mode, compiler, monkeypatch):
    monkeypatch.setattr("grp.getgrgid", lambda number: SimpleNamespace(gr_name="staff", gr_mem=[]))
    path = library._compiled()
    plant(path)
    # Only this user could have put it there.
    assert library._compiled() == path and path.read_text() == "planted"
    folder = compiler.with_name("cache") / level
    folder.chmod(mode)
    if mode == 0o1777 and not level:  # as in /tmp, only its owner could have
        assert library._compiled() == path
        return
    with pytest.raises(library.Unavailable, match=f"other users may write to {folder}$"):
        library._compiled()  # in every process, so that all of a run use XLA
    assert times_compiled(compiler) == 1


def test_a_library_that_others_may_write_to_or_own_is_compiled_again(compiler, monkeypatch):
    path = library._compiled()
    plant(path)
    path.chmod(0o777)
    assert library._compiled() == path and path.read_text() == "library\n"
    assert path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not library._is_whole(path)
    with pytest.raises(library.Unavailable, match="belongs to another user"):
        library._compiled()


def test_a_lock_that_is_a_link_is_not_followed(compiler, tmp_path):
    library._compiled().unlink()
    (lock,) = compiler.with_name("cache").glob("cope_jax/*.lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "new")
    with pytest.raises(OSError):
        library._compiled()
    assert not (tmp_path / "new").exists()


def test_a_new_cache_folder_is_this_users_alone_whatever_the_umask(compiler):
    before = os.umask(0o002)
    try:
        assert library._compiled() == library._compiled()
    finally:
        os.umask(before)
    assert times_compiled(compiler) == 1


@pytest.fixture
def uncompiled(monkeypatch):
    """No kernel can be compiled, and none is known before or after."""

    def forget():
        library._load_kernel.cache_clear()
        cpp_attention.tile_attention._untraced.cache_clear()

    monkeypatch.setattr(library, "KERNEL_FLAGS", ["--no-such-flag"])
    forget()
    yield
    forget()


def test_a_kernel_that_cannot_be_compiled_is_one_line_and_attention_goes_on(
    native, uncompiled, monkeypatch
):
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    monkeypatch.setenv(library.SETTING, "1")
    why = why_not(encoding, prepare(x, x, x, encoding=encoding))
    assert "attention cannot be compiled: " in why and "no-such-flag" in why and "\n" not in why
    exact = full_attention(encoding, prepare(x, x, x, encoding=encoding))
    np.testing.assert_allclose(attend(x, x, x, encoding=encoding), exact, rtol=0, atol=2e-5)


def test_kernels_are_compiled_at_the_same_time(native, uncompiled, monkeypatch):
    all_three = threading.Barrier(3)  # forward without and with what gradients need, backward

    def load(text):
        all_three.wait(timeout=60)

    monkeypatch.setattr(library, "cores", lambda: 2)
    monkeypatch.setattr(library, "load_kernel", load)
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    assert why_not(encoding, prepare(x, x, x, encoding=encoding)) is None


def test_a_kernel_that_fails_does_not_wait_for_the_others(native, uncompiled, monkeypatch):
    texts, go_on, ended = [], threading.Event(), threading.Event()

    def load(text):
        texts.append(text)
        if text == texts[0]:
            raise library.Unavailable("no reason")
        go_on.wait(timeout=60)
        ended.set()

    monkeypatch.setattr(library, "cores", lambda: 2)
    monkeypatch.setattr(library, "load_kernel", load)
    monkeypatch.setenv(library.SETTING, "1")
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    assert "no reason" in why_not(encoding, prepare(x, x, x, encoding=encoding))
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(timeout=60)


def test_a_kernel_that_is_required_must_compile(native, uncompiled, monkeypatch):
    monkeypatch.setenv(library.SETTING, "required")
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    with pytest.raises(ConfigError, match=r"NATIVE=required, but attention cannot be compiled: "):
        attend(x, x, x, encoding=encoding)
