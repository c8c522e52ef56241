"""Stores that take the groups of a row as they come: they need no other, so rows abreast may be stored in turn."""


class GroupStore:
    """A store of single groups; subclasses say what becomes of one in `group(j, y)`."""

    def begin(self):
        """What waits until the row's statistics are known."""

    def group(self, j, y):
        """Store round j, of fp32 values y."""
        raise NotImplementedError

    def end(self):
        """What is written behind the row's last group."""
