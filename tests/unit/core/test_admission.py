"""Who is let in next: order, fair share, and no room left unused."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from server.core.admission import Entry, FairQueue
from server.core.ids import TenantId

A, B, C = map(TenantId, "abc")


def entry(tenant: TenantId, tokens: int = 10, size: int = 1) -> Entry:
    return Entry(tenant=tenant, size=size, tokens=tokens)


def joined(queue: FairQueue, entries: Sequence[Entry]) -> None:
    for one in entries:
        queue.join(one)


def test_a_newcomer_is_next_however_many_of_another_wait():
    queue = FairQueue(room=2)
    flood = [entry(A) for _ in range(500)]
    joined(queue, flood)
    assert queue.admit() == flood[:2]
    late = entry(B)
    queue.join(late)
    assert queue.admit() == []
    queue.leave(flood[0], 10)
    assert queue.admit() == [late]


def test_two_floods_share_the_room_by_what_their_entries_may_cost():
    queue = FairQueue(room=9)
    joined(queue, [entry(A, tokens=20) for _ in range(20)])
    joined(queue, [entry(B, tokens=10) for _ in range(20)])
    assert Counter(one.tenant for one in queue.admit()) == {A: 3, B: 6}


def test_twice_the_weight_is_twice_the_share():
    queue = FairQueue(room=9, weights={A: 2.0})
    joined(queue, [entry(A) for _ in range(20)])
    joined(queue, [entry(B) for _ in range(20)])
    assert Counter(one.tenant for one in queue.admit()) == {A: 6, B: 3}


def test_what_was_not_used_is_given_back():
    """Both may cost 100; those of one tenant cost 10. In the long run tokens are shared alike, so
    it has ten times as many done."""
    queue = FairQueue(room=1)
    joined(queue, [entry(tenant, tokens=100) for _ in range(1100) for tenant in (A, B)])
    done: Counter[TenantId] = Counter()
    for _ in range(1100):
        (one,) = queue.admit()
        queue.leave(one, 10 if one.tenant == A else 100)
        done[one.tenant] += 1
    assert 990 <= done[A] <= 1010


def test_who_waits_no_longer_is_not_let_in_and_costs_nothing():
    queue = FairQueue(room=1)
    inside, gives_up, waits, other = entry(A), entry(B, tokens=1000), entry(B), entry(C)
    joined(queue, [inside, gives_up, waits, other])
    assert queue.admit() == [inside]
    queue.leave(gives_up, 0)
    queue.leave(inside, 10)
    assert queue.admit() == [waits]
    queue.leave(waits, 10)
    assert queue.admit() == [other]
    assert queue.num_waiting == 0


def test_one_that_is_larger_than_the_room_is_let_in_all_the_same():
    queue = FairQueue(room=4)
    small, large = entry(A, size=3), entry(A, size=100)
    joined(queue, [small, large, entry(A)])
    assert queue.admit() == [small, large]
    queue.leave(large, 10)
    assert len(queue.admit()) == 1


tenants = st.sampled_from([A, B, C])
entries = st.builds(entry, tenants, st.integers(1, 50), st.integers(1, 4))
moves = st.lists(st.one_of(entries, st.tuples(st.integers(0, 99), st.floats(0, 1))), max_size=80)


@dataclass
class World:
    """A queue and what it should hold."""

    queue: FairQueue
    room: int
    waiting: deque[Entry] = field(default_factory=deque)
    inside: list[Entry] = field(default_factory=list)

    def move(self, what: Entry | tuple[int, float]) -> None:
        if isinstance(what, Entry):
            self.queue.join(what)
            self.waiting.append(what)
            return
        number, used = what
        everything = [*self.inside, *self.waiting]
        if everything:
            gone = everything[number % len(everything)]
            (self.inside if gone in self.inside else self.waiting).remove(gone)
            self.queue.leave(gone, int(used * gone.tokens))

    def admit(self) -> list[Entry]:
        admitted = self.queue.admit()
        for one in admitted:
            mine = [other for other in self.waiting if other.tenant == one.tenant]
            assert one is mine[0], "overtaken by a later one of its tenant"
            self.waiting.remove(one)
            self.inside.append(one)
        return admitted


@given(moves, st.integers(1, 6))
def test_nothing_is_lost_or_overtaken_and_no_room_is_left_while_something_waits(moves, room):
    world = World(FairQueue(room), room)
    for what in moves:
        world.move(what)
        before = sum(one.size for one in world.inside)
        admitted = world.admit()
        inside = before + sum(one.size for one in admitted)
        assert world.queue.size_inside == inside
        assert world.queue.num_waiting == len(world.waiting)
        assert not world.waiting or inside >= room
        assert inside < room + max((one.size for one in admitted), default=0) or not admitted


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=30, max_size=30),
    st.lists(st.integers(0, 5), min_size=30, max_size=30),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(1, 6),
)
def test_while_two_tenants_wait_neither_is_ahead_by_more_than_one_entry_and_what_is_inside(
    costs, order, weight, room
):
    weights = {A: 1.0, B: weight}
    queue = FairQueue(room, weights)
    used = {}
    for i, (tokens, share) in enumerate(costs):
        one = entry((A, B)[i % 2], tokens)
        used[one] = int(tokens * share)
        queue.join(one)
    served, inside = {A: 0.0, B: 0.0}, queue.admit()
    left = Counter({A: 15, B: 15}) - Counter(one.tenant for one in inside)
    most = 50 * (room + 1) / min(weights.values())
    for number in order:
        if not inside:
            break
        gone = inside.pop(number % len(inside))
        queue.leave(gone, used[gone])
        served[gone.tenant] += used[gone] / weights[gone.tenant]
        admitted = queue.admit()
        inside += admitted
        left -= Counter(one.tenant for one in admitted)
        if left[A] and left[B]:
            assert abs(served[A] - served[B]) <= most
