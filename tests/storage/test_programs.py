import os
from pathlib import Path

import jax

from cope_jax.storage import programs


def test_programs_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path, capsys):
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "set, so that it is restored")
    try:
        jax.config.update("jax_compilation_cache_dir", "own")
        programs.keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] == "own"
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", missing_home)
        programs.keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o777)  # others could put programs there
        assert not capsys.readouterr().err
        programs.keep_programs()
        line = capsys.readouterr().err
        assert line.startswith(
            f"warning: other users may write to {tmp_path / 'shared'}, so no compiled programs are"
        )
        assert line.count("\n") == 1
        assert jax.config.values["jax_compilation_cache_dir"] is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        programs.keep_programs()
        folder = str(tmp_path / "cope_jax" / "programs" / programs.kind_of_cpu())
        assert (
            jax.config.values["jax_compilation_cache_dir"]
            == os.environ["JAX_COMPILATION_CACHE_DIR"]
            == folder
        )
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def missing_home():
    raise RuntimeError("Could not determine home directory.")
