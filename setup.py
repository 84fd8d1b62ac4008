"""What pyproject.toml has no words for: configs in the wheel, and links of the README that work on PyPI too."""

import re
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


def readme() -> str:
    """README.md, with images and links to files of the repository at their address."""
    url = "https://github.com/cope-jax/cope-jax"
    text = re.sub(r"!\[([^]]*)\]\((?!\w+:)", rf"![\1]({url}/raw/main/", Path("README.md").read_text(encoding="utf-8"))
    return re.sub(r"\]\((?!\w+:|#)", f"]({url}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
