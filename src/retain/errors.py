"""The few exceptions a user of Retain can meet. Everything else that goes wrong is a miss: counted and
logged, not raised.
"""


class RetainError(Exception):
    """Base of all errors here; its text is one sentence that says what was wrong and what to do."""


class ConfigError(RetainError):
    """A setting, tier address or command-line value that cannot be used as given."""


class UnsupportedModel(RetainError):
    """A model whose KV Retain does not know how to keep; the text names the layer or setting."""


class UnsupportedInput(RetainError):
    """A call whose input cannot be served correctly (a padded batch, positions that do not fit the cache)."""


class MissingDependency(RetainError):
    """A feature whose optional package is not installed; the text names the extra that brings it."""


class InvalidObject(RetainError):
    """Bytes that are not a whole, intact object of the expected identity. Inside the cache this becomes a
    counted miss.
    """


class ForeignObject(InvalidObject):
    """An object that is no worse than others, but not for this reader: of a later format, or encrypted."""


class MissingProfile(ForeignObject):
    """An object that is coded with a profile that this machine does not have."""


class InvalidProfile(RetainError):
    """A profile that contradicts itself, or bytes that are none."""


class StoreError(RetainError):
    """Base of what a store raises."""


class StoreUnavailable(StoreError):
    """The store could not answer within its deadline, or its medium failed."""


class StoreFull(StoreError):
    """The store has no room for the object; nothing of it was kept."""
