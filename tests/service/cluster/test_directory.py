"""Whose each session of a cluster is: claimed, told of, interrupted, adopted, and never lost."""

import json
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from service.cluster import directory
from service.cluster.directory import (
    CLAIMED,
    FORGOTTEN,
    LEASE,
    Directory,
    DirectoryRefused,
    Entry,
    Front,
    MemoryStore,
    Told,
)
from service.sessions.latch import Latch


def entry(session_id: str, front: str, owner: str | None = "alice", **more: object) -> Entry:
    told = {"record": '{"new": 1}', "status": {"session_id": session_id, "status": "running"}} | more
    return Entry(session_id, front, owner, **told)  # type: ignore[arg-type]


@dataclass
class Cluster:
    """A directory with a clock that a test moves."""

    store: MemoryStore = field(default_factory=MemoryStore)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.directory = Directory(self.store, self.now)

    def restart(self) -> None:
        self.directory = Directory(self.store, self.now)

    def beat(
        self, front: str, *entries: Entry, gone: Sequence[str] = (), held: Sequence[str] = (), life: str = "1"
    ) -> Told:
        ids = (*held, *(one.id for one in entries))
        said = Front(front, f"http://{front}", life=life)
        return self.directory.beat(said, ids, entries, self.now, gone=dict.fromkeys(gone))

    def claim(self, front: str, session_id: str, owner: str | None = "alice", life: str = "1") -> Latch | None:
        return self.directory.claim(front, life, session_id, owner, self.now)

    def adopt(self, front: str, session_id: str, life: str = "1") -> Entry:
        return self.directory.adopt(front, life, session_id, self.now)

    def find(self, session_id: str) -> tuple[Entry, str | None] | None:
        return self.directory.find(session_id, self.now)

    def statuses(self) -> dict[str, object]:
        return {one.id: one.status["status"] for one in self.directory.list(self.now)}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def refusal(error: pytest.ExceptionInfo[DirectoryRefused]) -> tuple[str, str]:
    return error.value.kind, str(error.value)


def test_an_id_that_another_front_has_is_taken(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    with pytest.raises(DirectoryRefused) as error:
        cluster.claim("b", "arm")
    assert refusal(error) == ("taken", "session 'arm' exists already: it is there, on the front a")


def test_who_does_not_own_a_taken_id_learns_nothing_of_it(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    with pytest.raises(DirectoryRefused) as error:
        cluster.claim("b", "arm", "bob")
    assert refusal(error) == ("taken", "the session id 'arm' is taken; choose another")
    with pytest.raises(DirectoryRefused, match="choose another"):
        cluster.claim("a", "arm", "bob")


def test_a_front_may_claim_an_id_of_its_own_again(cluster: Cluster) -> None:
    cluster.claim("a", "arm")
    cluster.claim("a", "arm")
    cluster.beat("a", entry("arm", "a"))
    cluster.claim("a", "arm")
    assert cluster.statuses() == {"arm": "running"}


def test_an_id_that_was_claimed_and_came_to_nothing_may_be_anybodys_on_that_front(cluster: Cluster) -> None:
    cluster.claim("a", "arm", "alice")
    cluster.claim("a", "arm", "bob")
    found = cluster.find("arm")
    assert found is not None
    assert found[0].owner == "bob"


def test_a_claim_that_came_to_nothing_is_free_again_in_a_while(cluster: Cluster) -> None:
    cluster.claim("a", "arm")
    cluster.now += CLAIMED - 0.1
    cluster.beat("a")
    with pytest.raises(DirectoryRefused):
        cluster.claim("b", "arm")
    cluster.now += 0.1
    cluster.beat("a")
    cluster.claim("b", "arm")


def test_a_claim_of_a_front_that_died_before_it_spoke_of_it_is_free_again_in_a_while(cluster: Cluster) -> None:
    cluster.beat("a")
    cluster.claim("a", "arm")
    cluster.now += CLAIMED - 0.1
    with pytest.raises(DirectoryRefused):
        cluster.claim("b", "arm")
    cluster.now += 0.1
    cluster.claim("b", "arm")
    found = cluster.find("arm")
    assert found is not None
    assert found[0].front == "b"


def test_a_claim_whose_session_is_gone_is_free_at_once_but_only_its_own_front_says_so(cluster: Cluster) -> None:
    cluster.claim("a", "arm")
    cluster.beat("b", gone=("arm",))
    with pytest.raises(DirectoryRefused):
        cluster.claim("b", "arm")
    cluster.beat("a", gone=("arm", "nothing"))
    cluster.claim("b", "arm")


def test_of_two_servers_of_one_name_the_second_is_refused_whatever_it_says(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    before = dict(cluster.store.texts)
    for attempt in (
        lambda: cluster.beat("a", entry("leg", "a"), gone=("arm",), life="2"),
        lambda: cluster.claim("a", "leg", life="2"),
        lambda: cluster.adopt("a", "arm", life="2"),
    ):
        with pytest.raises(DirectoryRefused) as error:
            attempt()
        assert refusal(error) == (
            "named",
            "another server has the name a in this cluster, at http://a, and lives; give each its own (--front-name)",
        )
    assert (cluster.statuses(), cluster.store.texts) == ({"arm": "running"}, before)


def test_a_name_is_free_when_its_front_has_been_silent_and_then_its_first_server_is_refused(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.now += LEASE
    assert cluster.beat("a", life="2").left == (entry("arm", "a"),)
    cluster.restart()
    for attempt in (lambda: cluster.beat("a", held=("arm",)), lambda: cluster.claim("a", "leg")):
        with pytest.raises(DirectoryRefused, match="has the name a"):
            attempt()
    cluster.claim("a", "leg", life="2")


def test_a_front_that_leaves_is_over_at_once(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.directory.leave("a", "2")
    assert cluster.statuses() == {"arm": "running"}, "another process of this name says nothing of this one"
    cluster.directory.leave("a", "1")
    cluster.directory.leave("nobody", "1")
    assert cluster.statuses() == {"arm": "interrupted"}
    assert cluster.beat("a", life="2").left == (entry("arm", "a"),)
    cluster.directory.leave("a", "2")
    assert cluster.adopt("b", "arm").front == "b"


def test_an_emergency_stop_stays_with_the_id_on_whatever_front_it_is_made_next(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a", latch="a hand"))
    cluster.beat("a", gone=("arm",))
    cluster.restart()
    assert cluster.claim("b", "arm", "bob") == Latch("a hand", "alice")
    cluster.beat("b", entry("arm", "b", "bob", latch="a hand"))
    cluster.beat("b", gone=("arm",))
    assert cluster.claim("a", "arm", "bob") == Latch("a hand", "bob")
    cluster.beat("a", entry("arm", "a", "bob", latch="a hand"))
    cluster.beat("a", entry("arm", "a", "bob"))  # it was reset
    cluster.beat("a", gone=("arm",))
    assert cluster.claim("b", "arm") is None
    assert not any(key.startswith("latch/") for key in cluster.store.texts)


def test_an_emergency_stop_that_was_not_told_in_time_is_told_with_the_end(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    said = Front("a", "http://a", life="1")
    cluster.directory.beat(said, [], [], cluster.now, gone={"arm": "a hand"})
    assert cluster.claim("b", "arm") == Latch("a hand", "alice")


def test_an_emergency_stop_outlives_a_session_of_a_dead_front_that_is_deleted(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a", latch="a hand"))
    cluster.now += LEASE
    cluster.directory.forget("arm", cluster.now)
    assert cluster.claim("b", "arm") == Latch("a hand", "alice")


def test_the_emergency_stop_of_a_gone_session_is_reset_by_whose_it_is(cluster: Cluster) -> None:
    unlatch = cluster.directory.unlatch
    cluster.beat("a", entry("arm", "a", latch="a hand"))
    assert not unlatch("arm", None), "its session is there, and is reset itself"
    cluster.beat("a", gone=("arm",))
    assert not unlatch("arm", ("bob",))
    assert unlatch("arm", ("alice",))
    assert not unlatch("arm", None)
    assert cluster.claim("b", "arm") is None


def test_emergency_stops_of_gone_sessions_have_an_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LATCHES", 2)
    for session_id in ("one", "two", "three"):
        cluster.beat("a", entry(session_id, "a", latch="a hand"))
        cluster.beat("a", gone=(session_id,))
    assert {key for key in cluster.store.texts if key.startswith("latch/")} == {"latch/two", "latch/three"}


def test_a_claim_alone_is_not_listed(cluster: Cluster) -> None:
    cluster.claim("a", "arm")
    assert cluster.directory.list(cluster.now) == []


def test_sessions_of_a_front_that_is_not_heard_of_are_interrupted_until_it_is(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.now += LEASE - 0.01
    assert cluster.statuses() == {"arm": "running"}
    cluster.now += 0.01
    (listed,) = cluster.directory.list(cluster.now)
    assert listed.status["status"] == "interrupted"
    assert listed.status["error_message"] == "the front a has not been heard of since; it was running"
    found = cluster.find("arm")
    assert found is not None
    assert found[1] is None
    cluster.beat("a", held=("arm",))
    assert cluster.statuses() == {"arm": "running"}
    assert cluster.find("arm") == (entry("arm", "a"), "http://a")


def test_fronts_are_those_that_live_and_silent_ones_those_that_left_sessions(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.beat("b")
    cluster.now += LEASE
    told = cluster.beat("c")
    assert [front.name for front in told.fronts] == ["c"]
    assert [(front.name, front.url) for front in told.silent] == [("a", "http://a")]
    cluster.adopt("c", "arm")
    assert cluster.beat("c", held=("arm",)).silent == ()


def test_a_front_that_left_nothing_is_forgotten_in_the_end(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.beat("b")
    cluster.now += FORGOTTEN + 1
    cluster.beat("c")
    known = {name for name in ("a", "b", "c") if cluster.directory.front(name) is not None}
    assert known == {"a", "c"}
    assert {key for key in cluster.store.texts if key.startswith("front/")} == {"front/a", "front/c"}


def test_what_a_front_says_it_holds_no_more_is_gone(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"), entry("leg", "a"))
    cluster.beat("a", held=("leg",), gone=("arm",))
    assert cluster.statuses() == {"leg": "running"}
    cluster.claim("b", "arm")


def test_a_front_cannot_say_that_anothers_session_is_gone(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.beat("b", gone=("arm",))
    assert cluster.statuses() == {"arm": "running"}


def test_a_front_cannot_tell_of_anothers_session_or_in_anothers_name(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.beat("b", entry("arm", "b", status={"status": "stopped"}), entry("leg", "a"))
    assert cluster.statuses() == {"arm": "running", "leg": "running"}
    assert [one.id for one in cluster.directory.of("b")] == ["leg"]


def test_a_front_that_lost_its_memory_is_told_what_it_had(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    assert cluster.beat("a").left == (entry("arm", "a"),)
    assert cluster.directory.of("a") == [entry("arm", "a")]


def test_one_that_was_never_ready_goes_with_its_front_s_memory(cluster: Cluster) -> None:
    cluster.claim("a", "arm")
    cluster.beat("a", entry("arm", "a", record="", status={"status": "initializing"}))
    cluster.now += CLAIMED
    assert cluster.beat("a").left == ()
    assert cluster.find("arm") is None


def test_only_the_session_of_a_dead_front_is_adopted_and_it_is_interrupted(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a", latch="a hand in the way"))
    with pytest.raises(DirectoryRefused) as error:
        cluster.adopt("b", "arm")
    assert refusal(error) == ("alive", "session 'arm' is on the front a, which lives")
    with pytest.raises(DirectoryRefused) as error:
        cluster.adopt("b", "leg")
    assert refusal(error) == ("unknown", "Session leg not found")
    cluster.now += LEASE
    adopted = cluster.adopt("b", "arm")
    assert (adopted.front, adopted.status["status"]) == ("b", "interrupted")
    assert (adopted.record, adopted.latch, adopted.owner) == ('{"new": 1}', "a hand in the way", "alice")


def test_of_two_that_adopt_one_gets_it(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.now += LEASE
    cluster.beat("b")
    cluster.beat("c")
    cluster.adopt("b", "arm")
    with pytest.raises(DirectoryRefused, match="on the front b, which lives"):
        cluster.adopt("c", "arm")
    assert cluster.adopt("b", "arm").front == "b", "whose answer was lost asks again"


def test_one_that_was_never_ready_cannot_be_adopted_but_deleted(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a", record="", status={"status": "initializing"}))
    cluster.now += LEASE
    with pytest.raises(DirectoryRefused) as error:
        cluster.adopt("b", "arm")
    assert error.value.kind == "unready"
    cluster.directory.forget("arm", cluster.now)
    assert cluster.find("arm") is None


def test_a_front_that_comes_back_learns_what_was_adopted_meanwhile(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"), entry("leg", "a"))
    cluster.now += LEASE
    cluster.adopt("b", "arm")
    assert cluster.beat("a", entry("arm", "a"), held=("leg",)).lost == (("arm", "b"),)
    assert [one.id for one in cluster.directory.of("b")] == ["arm"]
    assert cluster.beat("a", held=("leg",)).lost == ()


def test_an_adoption_whose_answer_was_lost_is_not(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.now += LEASE
    cluster.adopt("b", "arm")
    assert cluster.beat("b").left == (), "the answer may still be on its way"
    cluster.now += CLAIMED
    assert [one.id for one in cluster.beat("b").left] == ["arm"]
    cluster.now += 100 * CLAIMED
    assert [one.id for one in cluster.beat("b").left] == ["arm"]
    assert cluster.beat("b", entry("arm", "b")).left == ()


def test_only_the_session_of_a_dead_front_is_forgotten(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    with pytest.raises(DirectoryRefused, match="which lives"):
        cluster.directory.forget("arm", cluster.now)
    with pytest.raises(DirectoryRefused, match="Session leg not found"):
        cluster.directory.forget("leg", cluster.now)
    cluster.now += LEASE
    cluster.directory.forget("arm", cluster.now)
    assert cluster.statuses() == {}
    cluster.claim("b", "arm")


def test_a_directory_that_is_restarted_knows_all_that_matters(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a", latch="stopped"))
    cluster.claim("b", "leg", "bob")
    before = cluster.find("arm")
    cluster.restart()
    assert cluster.find("arm") == before
    with pytest.raises(DirectoryRefused, match="choose another"):
        cluster.claim("a", "leg", "alice")
    with pytest.raises(DirectoryRefused, match="which lives"):
        cluster.adopt("b", "arm")  # it gets the time to say that it does
    cluster.now += LEASE
    assert cluster.statuses() == {"arm": "interrupted"}
    assert cluster.adopt("b", "arm").latch == "stopped"
    cluster.restart()
    assert {one.id for one in cluster.directory.of("b")} == {"arm", "leg"}


def test_a_front_that_is_restarted_under_its_name_has_its_sessions_again(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    cluster.now += 2 * LEASE
    assert [one.record for one in cluster.directory.of("a")] == ['{"new": 1}']
    told = cluster.directory.beat(Front("a", "http://elsewhere", life="2"), ["arm"], [], cluster.now)
    assert (told.lost, told.left) == ((), ())
    found = cluster.find("arm")
    assert found is not None
    assert found[1] == "http://elsewhere"


def test_figures_alone_are_not_written_down(cluster: Cluster) -> None:
    cluster.beat("a", entry("arm", "a"))
    before = dict(cluster.store.texts)
    cluster.beat("a", entry("arm", "a", status={"session_id": "arm", "status": "running", "stats": {"ticks": 9}}))
    assert cluster.store.texts == before
    found = cluster.find("arm")
    assert found is not None
    assert found[0].status["stats"] == {"ticks": 9}
    cluster.beat("a", entry("arm", "a", status={"session_id": "arm", "status": "stopped", "stats": {"ticks": 9}}))
    assert json.loads(cluster.store.texts["session/arm"])["status"]["status"] == "stopped"


class FullStore(MemoryStore):
    is_full = False

    def put(self, key: str, text: str) -> None:
        if self.is_full:
            raise OSError("no place")
        super().put(key, text)

    def drop(self, key: str) -> None:
        if self.is_full:
            raise OSError("no place")
        super().drop(key)


def test_what_the_store_refuses_is_not_said_to_be_kept_and_is_kept_when_it_is_told_again() -> None:
    store = FullStore()
    cluster = Cluster(store)
    cluster.beat("a", entry("arm", "a"))
    store.is_full = True
    stopped = entry("arm", "a", status={"session_id": "arm", "status": "stopped"})
    with pytest.raises(OSError, match="no place"):
        cluster.beat("a", stopped)
    with pytest.raises(OSError, match="no place"):
        cluster.claim("a", "leg")
    with pytest.raises(OSError, match="no place"):
        cluster.beat("a", gone=("arm",))
    assert cluster.find("leg") is None
    store.is_full = False
    cluster.beat("a", stopped)
    assert json.loads(store.texts["session/arm"])["status"]["status"] == "stopped"
    cluster.beat("a", gone=("arm",))
    cluster.restart()
    assert cluster.find("arm") is None


IDS = ("arm", "leg")


@dataclass
class Server:
    """What a front has in memory; its robots move as long as it is awake."""

    name: str
    life: str = "1"
    held: set[str] = field(default_factory=set)
    spoken_of: set[str] = field(default_factory=set)


class Sharing(RuleBasedStateMachine):
    """Fronts that make, lose, adopt and delete sessions while they, and the directory, die in between."""

    fronts = Bundle("fronts")

    @initialize(target=fronts)
    def begin(self):
        self.store, self.now = MemoryStore(), 0.0
        self.directory = Directory(self.store, self.now)
        self.awake = {name: Server(name) for name in "abc"}
        self.awake["twin of a"] = Server("a", "2")
        self.acknowledged: set[str] = set()
        return multiple(*self.awake)

    def beat(self, name: str, *, is_heard: bool = True) -> None:
        front = self.awake[name]
        gone = sorted(front.spoken_of - front.held)
        front.spoken_of |= front.held
        held = sorted(front.held)
        said = Front(front.name, f"http://{name}", life=front.life)
        news = [entry(one, front.name) for one in held]
        try:
            told = self.directory.beat(said, held, news, self.now, gone=dict.fromkeys(gone))
        except DirectoryRefused:
            if is_heard:
                front.held, front.spoken_of = set(), set()
            return
        if is_heard:
            front.spoken_of = set(held)
            front.held -= {session_id for session_id, _ in told.lost}
            front.held |= {one.id for one in told.left}

    @rule(seconds=st.sampled_from([LEASE, CLAIMED]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=fronts, is_heard=st.booleans())
    def say(self, name: str, is_heard: bool) -> None:
        self.beat(name, is_heard=is_heard)

    @rule(name=fronts, session_id=st.sampled_from(IDS))
    def make(self, name: str, session_id: str) -> None:
        if session_id in self.awake[name].held:
            return
        front = self.awake[name]
        try:
            self.directory.claim(front.name, front.life, session_id, "alice", self.now)
        except DirectoryRefused:
            return
        front.held.add(session_id)
        self.beat(name)  # a front tells of it before it answers
        if session_id in front.held:
            self.acknowledged.add(session_id)

    @rule(name=fronts, session_id=st.sampled_from(IDS))
    def fail_to_make(self, name: str, session_id: str) -> None:
        front = self.awake[name]
        if session_id not in front.held:
            with suppress(DirectoryRefused):
                self.directory.claim(front.name, front.life, session_id, "alice", self.now)

    @rule(name=fronts, session_id=st.sampled_from(IDS))
    def delete(self, name: str, session_id: str) -> None:
        if session_id in self.awake[name].held:
            self.awake[name].held.discard(session_id)
            if session_id not in {one.id for one in self.directory.of(self.awake[name].name)}:
                return  # it was adopted by another front, and is there
            self.acknowledged.discard(session_id)

    @rule(name=fronts, session_id=st.sampled_from(IDS), is_heard=st.booleans(), after=st.sampled_from([0.0, LEASE]))
    def adopt(self, name: str, session_id: str, is_heard: bool, after: float) -> None:
        self.now += after
        self.awake[name].spoken_of.discard(session_id)
        try:
            self.directory.adopt(self.awake[name].name, self.awake[name].life, session_id, self.now)
        except DirectoryRefused:
            return
        if is_heard:
            self.awake[name].held.add(session_id)

    @rule(session_id=st.sampled_from(IDS))
    def forget(self, session_id: str) -> None:
        try:
            self.directory.forget(session_id, self.now)
        except DirectoryRefused:
            return
        self.acknowledged.discard(session_id)

    @rule(name=fronts)
    def die_and_come_back_without_memory(self, name: str) -> None:
        before = self.awake[name]
        self.awake[name] = Server(before.name, before.life + "'")
        self.beat(name)

    @rule()
    def restart_the_directory(self) -> None:
        self.directory = Directory(self.store, self.now)

    @invariant()
    def an_acknowledged_session_is_there(self) -> None:
        if not hasattr(self, "awake"):
            return
        there = {one.id for name in "abc" for one in self.directory.of(name) if one.record}
        held = {session_id for front in self.awake.values() for session_id in front.held}
        assert self.acknowledged <= there | held, f"lost: {self.acknowledged - there - held}"

    @invariant()
    def when_all_have_spoken_no_two_fronts_have_one_session(self) -> None:
        if not hasattr(self, "awake"):
            return
        before = self.directory, self.store, self.awake
        self.store, self.awake = deepcopy(self.store), deepcopy(self.awake)
        self.directory = Directory(self.store, self.now)
        for name in (*self.awake, *self.awake):
            self.beat(name)
        held = [session_id for front in self.awake.values() for session_id in sorted(front.held)]
        self.directory, self.store, self.awake = before
        assert len(held) == len(set(held)), held


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=100, stateful_step_count=40)
