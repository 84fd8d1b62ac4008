from tests.commands.conftest import config, start  # noqa: F401
