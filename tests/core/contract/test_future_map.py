"""The relay at its edges: padding rows, wrong rows, optional fields, and the debug mode.
The relay contract covers the rest."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.contract.future_map import (
    CELL_TRANSITIONS,
    LENGTH_TRANSITIONS,
    CellEvent,
    CellState,
    FutureMap,
    NumpyStorage,
    RelayField,
)
from foredraft.core.errors import InvariantViolation

HIDDEN = RelayField("hidden_states", (4,), "float32")
BONUS = RelayField("bonus_tokens", (), "int32")
TOPK = RelayField("topk_ids", (3,), "int64")


def rows_of(*rows):
    return np.array(rows, np.int32)


def epochs_of(*epochs):
    return np.array(epochs, np.int64)


def inputs(n, base=0):
    return {
        "bonus_tokens": np.arange(base, base + n, dtype=np.int32),
        "topk_ids": np.arange(3 * n).reshape(n, 3) + base,
    }


def write(relay, rows, epochs, base=0):
    relay.publish(rows, epochs, np.arange(len(rows)) + base + 100)
    relay.stash(rows, epochs, inputs(len(rows), base))


@pytest.fixture(params=[False, True], ids=["plain", "poison"])
def relay(request):
    return FutureMap(8, (BONUS, TOPK), debug_poison=request.param)


def violation(invariant_id, call, *arguments):
    with pytest.raises(InvariantViolation) as caught:
        call(*arguments)
    assert caught.value.invariant == invariant_id
    return str(caught.value)


def test_another_epoch_gets_an_error_never_a_value(relay):
    write(relay, rows_of(1, 2), epochs_of(3, 3))
    message = violation("RELAY-03", relay.resolve, rows_of(2, 1), epochs_of(3, 4))
    assert "row 1" in message and "epoch 3" in message and "epoch 4" in message
    assert relay.num_unread == 2  # and nothing was consumed on the way
    relay.resolve(rows_of(1, 2), epochs_of(3, 3))


def test_a_dirty_padding_row_is_found():
    class Careless(NumpyStorage):
        def scatter(self, buffer, rows, values, sources):
            super().scatter(buffer, rows, values, sources)
            buffer[0] = 1

    relay = FutureMap(4, (BONUS,), storage=Careless())
    relay.publish(rows_of(1), epochs_of(1), np.array([5]))
    assert "lengths" in violation("RELAY-02", relay.check)


@pytest.mark.parametrize("rows", [(3, 1, 3), (9,), (-1,)])
def test_rows_that_cannot_be_meant(relay, rows):
    expected = "RELAY-02" if len(rows) == 3 else "RELAY-03"
    violation(expected, write, relay, rows_of(*rows), epochs_of(*[1] * len(rows)))
    violation(expected, relay.resolve, rows_of(*rows), epochs_of(*[1] * len(rows)))
    assert relay.num_unread == 0


def test_hidden_states_exist_only_where_the_algorithm_relays_them():
    standalone, eagle = FutureMap(4, (BONUS,)), FutureMap(4, (BONUS, HIDDEN))
    bonus, states = np.array([1], np.int32), np.ones((1, 4), np.float32)
    violation("ACCEPT-17", standalone.stash, rows_of(1), epochs_of(1), {"bonus_tokens": bonus, "hidden_states": states})
    violation("ACCEPT-17", eagle.stash, rows_of(1), epochs_of(1), {"bonus_tokens": bonus, "hidden_states": None})
    violation("ACCEPT-17", eagle.stash, rows_of(1), epochs_of(1), {"bonus_tokens": bonus})
    standalone.stash(rows_of(1), epochs_of(1), {"bonus_tokens": bonus, "hidden_states": None})
    standalone.publish(rows_of(1), epochs_of(1), np.array([5]))
    assert "hidden_states" not in standalone.resolve(rows_of(1), epochs_of(1))[1]
    saved = sum(eagle.bytes_per_row.values()) - sum(standalone.bytes_per_row.values())
    assert saved == eagle.bytes_per_row["hidden_states"] == 16


def test_fields_may_be_plain_tuples_and_bfloat16_is_counted():
    relay = FutureMap(2, (("bonus_tokens", (), "int32"),))
    assert relay.fields == (BONUS,)
    assert RelayField("hidden_states", (4096,), "bfloat16").bytes_per_row == 8192


class Forgetful(NumpyStorage):
    """A storage that loses every write: what a missing device-side copy looks like."""

    def scatter(self, buffer, rows, values, sources):
        pass


def test_poison_proves_that_a_value_was_really_written():
    relay = FutureMap(4, (BONUS,), storage=Forgetful(), debug_poison=True)
    relay.publish(rows_of(1), epochs_of(1), np.array([5]))
    relay.stash(rows_of(1), epochs_of(1), {"bonus_tokens": np.array([1], np.int32)})
    assert "consumed before" in violation("RELAY-02", relay.resolve, rows_of(1), epochs_of(1))


@pytest.mark.parametrize("consume", ["resolve", "drop"])
def test_consumed_cells_hold_poison(consume):
    storage = NumpyStorage()
    buffers = []
    storage.allocate = lambda n, f: buffers.append(NumpyStorage.allocate(storage, n, f)) or buffers[-1]
    relay = FutureMap(4, (BONUS, TOPK, HIDDEN), storage=storage, debug_poison=True)
    relay.publish(rows_of(1, 2), epochs_of(1, 1), np.array([5, 6]))
    relay.stash(rows_of(1, 2), epochs_of(1, 1), inputs(2) | {"hidden_states": np.ones((2, 4), np.float32)})
    relay.resolve(rows_of(1), epochs_of(1)) if consume == "resolve" else relay.drop(rows_of(1))
    for buffer in buffers:
        assert storage.is_poison(buffer).tolist() == [False, True, False, True, True]


def test_no_placeholder_reaches_a_draft():
    relay = FutureMap(4, (BONUS, HIDDEN), debug_poison=True)
    values = {"bonus_tokens": np.array([-1, 3], np.int32), "hidden_states": np.full((2, 4), -1, np.float32)}
    assert "row 2" in violation("RELAY-05", relay.stash, rows_of(2, 3), epochs_of(1, 1), values)
    relay.stash(rows_of(0, 3), epochs_of(1, 1), values)  # padding lanes may hold anything
    assert relay.num_unread == 1


def test_more_rows_than_there_are(relay):
    violation("RELAY-02", write, relay, rows_of(*[*range(1, 9), *range(1, 9)]), epochs_of(*[1] * 16))
    write(relay, rows_of(*[0] * 30, 1), epochs_of(*[1] * 31))
    assert relay.num_unread == 1


WAYS = {  # the events that bring an empty cell to a state
    CellState.EMPTY: (),
    CellState.PUBLISHED: (CellEvent.PUBLISH,),
    CellState.STASHED: (CellEvent.STASH,),
    CellState.WHOLE: (CellEvent.PUBLISH, CellEvent.STASH),
}


@pytest.mark.parametrize("event", CellEvent, ids=lambda event: event.name)
@pytest.mark.parametrize("state", CellState, ids=lambda state: state.name)
@pytest.mark.parametrize("fields", [(BONUS, TOPK), ()], ids=["fields", "lengths alone"])
def test_a_cell_follows_its_table(fields, state, event):
    relay = FutureMap(2, fields)
    row, epoch, values = rows_of(1), epochs_of(7), inputs(1) if fields else {}
    calls = {
        CellEvent.PUBLISH: lambda: relay.publish(row, epoch, np.array([5])),
        CellEvent.STASH: lambda: relay.stash(row, epoch, values),
        CellEvent.RESOLVE: lambda: relay.resolve(row, epoch),
        CellEvent.PASS_THROUGH: lambda: relay.pass_through(row, epoch),
        CellEvent.DROP: lambda: relay.drop(row),
    }
    table = CELL_TRANSITIONS if fields else LENGTH_TRANSITIONS
    if state not in table:
        return
    for before in WAYS[state]:
        calls[before]()
    assert relay.num_unread == (state is not CellState.EMPTY)
    following = table[state].get(event)
    if following is None:
        violation("RELAY-02", calls[event])
        following = state
    else:
        calls[event]()
    refused = [other for other in (CellEvent.PUBLISH, CellEvent.STASH) if table[following].get(other) is None]
    for other in refused:
        violation("RELAY-02", calls[other])
    if CellEvent.RESOLVE in table[following]:
        lengths, _ = relay.resolve(row, epoch)
        assert lengths.tolist() == [5]
    else:
        violation("RELAY-02", calls[CellEvent.RESOLVE])
