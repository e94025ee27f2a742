"""A store keeps records whole, refuses what it must not touch, and lends each attempt to one runner at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metakernelbench.attempts.record import Submission
from metakernelbench.errors import InfrastructureFault, StoreError, UnknownName
from metakernelbench.experiments.designs import Plan, PlannedAttempt
from metakernelbench.experiments.plan import plan_of
from metakernelbench.store import leases as leases_module
from metakernelbench.store.artifacts import Artifacts
from metakernelbench.store.database import NoStore
from metakernelbench.store.leases import Leases
from metakernelbench.store.packing import pack, unpack
from metakernelbench.store.schema import SCHEMA_VERSION
from metakernelbench.store.store import Store
from tests.disk import files_of_at_most
from tests.experiments.support import record_of, spec_of, verdict_of
from tests.store.conftest import Place

SOLO = PlannedAttempt(problem="p28", dsl="tirx", model="vendor/model")
SETTINGS = spec_of(Path()).attempt


def saved(store: Store, planned: PlannedAttempt = SOLO) -> None:
    spec = spec_of(store.folder)
    store.save_experiment(spec, plan_of(spec))
    store.save_attempt("small", planned, record_of(planned, SETTINGS, None))


def test_what_is_saved_is_read_back_equal(store: Store) -> None:
    record = record_of(SOLO, SETTINGS, None).model_copy(
        update={
            "submissions": (
                Submission(
                    number=1,
                    requested_at_s=1.5,
                    source="x = 1\n" * 1000,
                    verdict=verdict_of(SOLO, passed=True),
                    answer="passed",
                ),
            ),
            "trajectory": {"steps": [{"message": "a" * 5000, "$artifact": "not one"}]},
            "versions": {"torch": "2.13"},
        }
    )
    store.save_attempt("small", SOLO, record)
    assert store.attempt("small", SOLO.key) == record
    assert store.skill("small", SOLO.key) == record.skill


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec=None, exclude_categories=()), max_size=50), copies=st.sampled_from([1, 3000]))
def test_any_text_survives_packing(tmp_path: Path, text: str, copies: int) -> None:
    artifacts = Artifacts(tmp_path / "artifacts")
    record = record_of(SOLO, SETTINGS, None).model_copy(update={"kernel": text * copies, "skill": text})
    assert unpack(pack(record, artifacts.put), artifacts) == record


def test_attempts_come_in_the_order_of_the_plan_and_only_those_it_asks_for(store: Store) -> None:
    saved(store, PlannedAttempt(problem="p72", dsl="tirx", model="vendor/model"))
    saved(store, SOLO)
    saved(store, PlannedAttempt(problem="p03", dsl="tirx", model="vendor/model"))
    assert [key for key, _ in store.attempts("small")] == [
        "p03/tirx/vendor/model/0/solo",
        "p28/tirx/vendor/model/0/solo",
    ]


def test_an_experiment_is_read_back_as_it_was_last_run(store: Store) -> None:
    spec = spec_of(store.folder)
    store.save_experiment(spec, Plan(attempts=(), comparisons=()))
    store.save_experiment(spec, plan_of(spec))
    stored = store.experiment("small")
    assert (stored.spec, stored.plan) == (spec, plan_of(spec))
    assert store.experiments() == ["small"]


def test_an_unknown_experiment_lists_the_nearest(store: Store) -> None:
    saved(store)
    with pytest.raises(UnknownName, match="unknown experiment `smal`; nearest: `small`"):
        store.experiment("smal")


def test_a_replaced_record_stays_in_the_database(place: Place, store: Store) -> None:
    saved(store)
    saved(store)
    assert place.execute("SELECT superseded_at IS NULL FROM attempts ORDER BY id") == [(False,), (True,)]
    assert len(list(store.attempts("small"))) == 1


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(place: Place) -> None:
    place.open(create=True).close()
    place.execute("UPDATE schema_version SET version = ?", SCHEMA_VERSION + 1)
    place.execute("DROP TABLE leases")
    for create in (True, False):
        with pytest.raises(StoreError, match="newer metakernelbench"):
            place.open(create=create)
    assert place.execute("SELECT version FROM schema_version") == [(SCHEMA_VERSION + 1,)]
    place.execute("CREATE TABLE leases (nobody text)")  # would fail had it been made again


def test_a_store_of_the_first_layout_is_brought_up_to_date_and_keeps_what_it_has(place: Place, store: Store) -> None:
    saved(store)
    place.execute("DROP TABLE rematches")
    place.execute("UPDATE schema_version SET version = 1")
    again = place.open()
    assert again.attempt("small", SOLO.key) == record_of(SOLO, SETTINGS, None)
    assert again.rematches.of("small") == {}
    assert place.execute("SELECT version FROM schema_version") == [(SCHEMA_VERSION,)]


def test_a_database_of_another_program_is_refused(place: Place) -> None:
    place.execute("CREATE TABLE notes (line text)")
    with pytest.raises(StoreError, match="belongs to another program"):
        place.open(create=True)


def test_a_database_without_a_store_is_left_empty_where_none_is_to_be_made(place: Place) -> None:
    with pytest.raises(NoStore, match="there is no store"):
        place.open()
    with pytest.raises(NoStore, match="there is no store"):
        place.open()


@pytest.mark.parametrize("damage", ["DELETE FROM schema_version", "UPDATE schema_version SET version = 'two'"])
def test_a_store_whose_layout_is_not_known_is_damaged(tmp_path: Path, damage: str) -> None:
    place = Place(tmp_path)
    place.open(create=True).close()
    place.execute(damage)
    for create in (True, False):
        with pytest.raises(StoreError, match="is damaged: its table `schema_version`") as caught:
            place.open(create=create)
        assert "from a copy" in str(caught.value.hint)


@pytest.mark.parametrize("size", [0, 2000])
def test_a_disk_without_room_is_told_in_a_sentence(tmp_path: Path, size: int) -> None:
    with files_of_at_most(size), pytest.raises(StoreError, match="cannot be used: disk I/O error"):
        Store.open(tmp_path / "store", create=True)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_text("my shopping list, which is longer than a database's header " * 10)
    with pytest.raises(StoreError, match="not a database") as caught:
        Store.open(tmp_path, create=True)
    assert "from a copy" in str(caught.value.hint)


@pytest.mark.parametrize("record", ["{", '{"problem": "p28"}'])
def test_a_damaged_record_is_named_in_a_sentence(place: Place, record: str) -> None:
    with place.open(create=True) as store:
        saved(store)
    place.execute(f"UPDATE attempts SET record = '{record}'")
    store = place.open()
    readings: list[Callable[[str], Iterable[object]]] = [
        store.attempts,
        store.outlines,
        lambda name: store.digests(name, "kernel", [SOLO.key]),
        lambda name: store.part(name, SOLO.key, "kernel") or "",
        lambda name: store.usages(name, [SOLO.key]),
    ]
    for read in readings:
        with pytest.raises(StoreError, match=f"the record of {SOLO.key} in .* cannot be read: ") as caught:
            list(read("small"))
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("plan", ["{", "{}", '{"attempts": [{"nothing": 1}], "comparisons": []}'])
def test_a_damaged_plan_is_named_in_a_sentence(place: Place, plan: str) -> None:
    with place.open(create=True) as store:
        saved(store)
        place.execute("UPDATE experiments SET plan = ?", store._artifacts.put(plan))
    with pytest.raises(StoreError, match=r"the plan of `small` in .* cannot be read: "):
        place.open().experiment("small")


@pytest.mark.parametrize("place", ["nowhere", "sqlite-of-sorts://x", "postgresql://nobody:secret@127.0.0.1:1/none"])
def test_a_place_without_a_store_is_one_sentence(tmp_path: Path, place: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(place if "://" in place else tmp_path / place, folder=tmp_path)
    assert caught.value.hint
    assert "secret" not in f"{caught.value.message} {caught.value.hint}" and "\n" not in caught.value.message


@pytest.mark.parametrize("place", ["mysql://x/y", "http://x/y"])
def test_what_is_no_database_of_ours_is_not_asked_for_a_folder(place: str) -> None:
    with pytest.raises(StoreError, match=f"the store {place} is no folder and no PostgreSQL database"):
        Store.open(place)


def test_a_store_without_experiments_says_that_there_is_none(tmp_path: Path) -> None:
    with Store.open(tmp_path, create=True) as store, pytest.raises(UnknownName) as caught:
        store.experiment("demo")
    assert caught.value.message == "unknown experiment `demo`; there is none"


def test_a_store_without_a_name_is_no_store_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="name is empty"):
        Store.open("", create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_artifact_is_noticed(store: Store) -> None:
    saved(store)
    for path in (store.folder / "artifacts").glob("*/*.gz"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match="cannot be read"):
        store.attempt("small", SOLO.key)


def test_an_attempt_is_lent_to_one_owner_until_it_is_released(store: Store) -> None:
    with store.leases.owner() as one, store.leases.owner() as other:
        assert store.leases.claim("small", SOLO.key, one)
        assert store.leases.claim("small", SOLO.key, one), "to whom it is lent already"
        assert not store.leases.claim("small", SOLO.key, other)
        assert store.leases.held("small") == {SOLO.key: one.name}
        store.leases.release(one, "small", SOLO.key)
        assert store.leases.claim("small", SOLO.key, other)


def test_saving_a_record_gives_its_lease_back(store: Store) -> None:
    with store.leases.owner() as one:
        store.leases.claim("small", SOLO.key, one)
        store.save_attempt("small", SOLO, record_of(SOLO, SETTINGS, None), owner=one)
        assert store.leases.held("small") == {}


def test_a_lease_without_a_sign_of_life_expires_and_its_owner_cannot_save(tmp_path: Path, store: Store) -> None:
    now = [1000.0]
    leases = Leases(store._database, tmp_path / "runners", clock=lambda: now[0])
    with leases.owner() as one, leases.owner() as other:
        leases.claim("small", SOLO.key, one)
        now[0] += leases_module.LEASE_S - 1
        assert not leases.claim("small", SOLO.key, other)
        leases.renew(one)
        now[0] += leases_module.LEASE_S - 1
        assert not leases.claim("small", SOLO.key, other)
        now[0] += 2
        assert leases.claim("small", SOLO.key, other)
        with pytest.raises(InfrastructureFault, match="another runner has taken over"):
            store.save_attempt("small", SOLO, record_of(SOLO, SETTINGS, None), owner=one)
    assert store.attempt("small", SOLO.key) is None


def test_the_leases_of_a_runner_that_is_gone_are_free_at_once(store: Store) -> None:
    keys = [SOLO.key, "another"]
    dead = store.leases.owner()
    for key in keys:
        store.leases.claim("small", key, dead)
    dead._file.close()  # what the operating system does when a process dies
    assert store.leases.held("small") == {}
    with store.leases.owner() as alive:
        assert all(store.leases.claim("small", key, alive) for key in keys)


def test_faults_are_kept_in_order_and_harmless(store: Store) -> None:
    store.record_fault("small", SOLO.key, try_number=1, gave_up=False, message="the sandbox\x00 was lost\udcff")
    store.record_fault("small", SOLO.key, try_number=2, gave_up=True, message="again")
    assert [(f.key, f.try_number, f.gave_up, f.message) for f in store.faults("small")] == [
        (SOLO.key, 1, False, "the sandbox� was lost�"),
        (SOLO.key, 2, True, "again"),
    ]
