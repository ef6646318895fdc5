"""Whatever breaks, clients of real daemons get right bytes, in time, and nothing is left behind."""

import pytest

from retain.bench.chaos.beds import BEDS
from retain.bench.chaos.faults import Scale, all_faults
from retain.bench.chaos.run import run_faults

ONCE = Scale(kills=1, client_kills=2, restarts=1, rounds=1, hang=1.0, period=0.4)

SOME = {
    "http": ("resets", "half", "status 500", "status 404", "swapped"),
    "object": ("half", "status 500", "bit flips"),
    "memory": (),
}
"""Of beds whose faults are those of another bed, some; the bench tries all."""

KILLED = ("disk", "stack")
"""Beds on which processes are killed here; the bench kills them on all."""


def tried(bed):
    """The faults that are tried on a bed."""
    return [
        fault
        for fault in all_faults()
        if fault.bed == bed
        and ("kill -9" not in fault.name or bed in KILLED)
        and (bed not in SOME or any(each in fault.name for each in SOME[bed]))
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("bed", [bed for bed in BEDS if tried(bed)])
def test_a_fault_costs_misses_and_never_wrong_bytes_a_hang_or_a_leak(bed):
    for outcome in run_faults(tried(bed), ONCE, 1, lambda text, rounds: None):
        if outcome.skipped:
            pytest.skip(outcome.skipped)
        assert not outcome.troubles, f"{outcome.fault.title}: {outcome.troubles}"
        assert outcome.rounds == outcome.fault.rounds(ONCE)
        assert outcome.seen.counts["lookups"]
