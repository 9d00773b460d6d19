"""A module that is imported late, or not at all."""


def ask():
    pass
