"""What pyproject.toml has no words for: the wheel has experiments/configs as cope_jax/configs."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies the config files, by whose names an installed package knows them; a checkout has them at their place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            configs = Path(self.build_lib, "cope_jax", "configs")
            shutil.copytree("experiments/configs", configs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*"))


setup(cmdclass={"build_py": BuildWithConfigs})
