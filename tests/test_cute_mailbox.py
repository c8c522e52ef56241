"""What is wrong with the mailboxes of a cluster's exchanges is seen by the interpreter of the CuTe kernels."""

import pytest

from flashnorm.kernels import memory
from flashnorm.kernels.frame import Frame
from flashnorm.kernels.tile import SLOT, RowTile
from tests.cute_launch import check, dtypes_of
from tests.test_cute_kernels import NORM, STANDARD, B, dynamic

pytestmark = pytest.mark.cpu_only


def run():
    """Sums of one, three and, of a maximum, other numbers of values; rows in shared memory behind the mailboxes."""
    tile = RowTile(2560, 8, 64, 64, 4, mailbox=True, signal_early=True)
    for program in (NORM, STANDARD, dynamic(block=0)):
        check(program, dtypes_of(program), 2560, tile, padding=3 if program not in (NORM, STANDARD) else 0)
    staged = RowTile(2560, 8, 64, 64, 4, hold="shared", staged=True, early_weights=False, mailbox=True)
    check(NORM, (B, B, B), 2560, staged)


def _nothing(_):
    return lambda *_: None


def _moved(change):
    """A Frame whose constructor is followed by `change`."""

    def replaced(original):
        def init(self, tile, *args, **more):
            original(self, tile, *args, **more)
            change(self)

        return init

    return replaced


def _onto_sums(frame):
    frame.mailboxes = frame._exchange_base


def _onto_rows(frame):
    frame.stage_base = frame.stage_base - SLOT


FAULTS = {
    "never opened": (Frame, "open_mailboxes", _nothing),
    "no fence": (memory, "publish_mailboxes", _nothing),
    "nobody waits for peers": (memory, "cluster_wait", _nothing),
    "nobody says that it runs": (memory, "cluster_begin", _nothing),
    "sent to another": (memory, "send_float", lambda o: lambda s, r, v, box, p: o(s, r, v, box + SLOT, p)),
    "expected at another": (memory, "expect_bytes", lambda o: lambda box, n, p: o(box + SLOT, n, p)),
    "opened elsewhere": (memory, "open_mailbox", lambda o: lambda box, p: o(box + 4096, p)),
    "too many bytes expected": (memory, "expect_bytes", lambda o: lambda box, n, p: o(box, n + 4, p)),
    "every thread expects": (memory, "expect_bytes", lambda o: lambda box, n, p: o(box, n, p * 0 + 1)),
    "on top of the sums": (Frame, "__init__", _moved(_onto_sums)),
    "under the rows": (Frame, "__init__", _moved(_onto_rows)),
    "one for all": (Frame, "mailbox", lambda o: lambda self: (self.mailboxes, o(self)[1]) if o(self) else None),
}


def test_as_they_are():
    run()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    place, name, replaced = FAULTS[fault]
    monkeypatch.setattr(place, name, replaced(getattr(place, name)))
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        run()
