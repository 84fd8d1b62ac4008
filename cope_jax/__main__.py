"""Runs a command: `cope-jax NAME FLAGS`, or `python -m cope_jax NAME FLAGS`."""

from cope_jax.cli import interrupts


def main() -> None:
    """Runs the command that the first argument names."""
    interrupts.install()  # first, because the imports of a command take seconds
    from cope_jax.cli.exits import clear_errors

    with clear_errors():  # also of imports: an extra may not be installed
        from cope_jax.cli.run import run_command

        run_command()


if __name__ == "__main__":
    main()
