"""The one error that is the user's to mend."""


class ConfigError(ValueError):
    """Wrong input that the user can mend: the message is one line that says what is wrong and what to do.

    Commands print it and exit with status 2; any other exception is a defect of the package and keeps its traceback.
    """
