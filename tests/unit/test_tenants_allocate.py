"""Class ids are chosen once, put in at their place and nowhere else, and never given away early."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.cli.main import run
from kura_shaper.errors import DocumentError, RefusedError, UsageError
from kura_shaper.tenants.allocate import Allocation, _Draft, _Place, _written, allocate, candidate, choose
from kura_shaper.tenants.file import load_tenants, parse_tenants
from kura_shaper.tenants.ledger import Freed, Ledger, ledger_path, ledger_text, read_ledger, replace_file

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)
HEAD = "apiVersion: kura-shaper/v1\nkind: Tenants\nregion: us-east\n"
LAST = 0xFFFE
# Written down: ids of documents that were allocated long ago depend on it.
CANDIDATE_OF_ACME = 0x25CF


def allocated(text: str, ledger: Ledger | None = None, *, now: datetime = NOW) -> Allocation:
    """Return an allocation, done twice: the second finds nothing to do."""
    made = allocate(text, ledger or Ledger(), file="t.yaml", now=now)
    again = allocate(made.text, made.ledger, file="t.yaml", now=now)
    assert (again.text, again.assigned, again.ledger) == (made.text, {}, made.ledger)
    return made


def classes(text: str) -> dict[str, int]:
    return {tenant.name: tenant.class_id for tenant in parse_tenants(text, file="t.yaml").tenants}


def document(*names: str, **ids: int) -> str:
    """Return a document of tenants without classes, and of tenants with one."""
    rows = [f"  - name: {name}\n" for name in names]
    rows += [f"  - name: {name}\n    class: {class_id:#x}\n" for name, class_id in ids.items()]
    return f"{HEAD}tenants:\n{''.join(rows)}" if rows else f"{HEAD}tenants: []\n"


# The text.

WRITTEN = """\
# Ours. Ä ☃ 𝄞
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east   # the first
gateway: {https_ports: [443]}

tenants:
    # A customer of long standing.
    - name: "acme"    # renamed once: 'acme-old'

      floor: 25M
      client_cidrs:
        - 10.0.0.0/8

    - { name: beta , floor: 1M }   # in one line
    - {"floor": 1M, "name": 'gamma'}
    - floor: 2M
      name: delta
    - class: 0x1234
      name: epsilon
    - name:
        zeta
      floor: 3M
    - name: >-
        eta
      hosts: []
# The end."""


def test_a_class_stands_behind_its_name_and_nothing_else_is_touched() -> None:
    made = allocated(WRITTEN)
    ids = made.assigned
    expected = (
        WRITTEN.replace("'acme-old'\n", f"'acme-old'\n      class: {ids['acme']:#x}\n")
        .replace("beta ,", f"beta, class: {ids['beta']:#x} ,")
        .replace("'gamma'}", f"'gamma', class: {ids['gamma']:#x}}}")
        .replace("name: delta\n", f"name: delta\n      class: {ids['delta']:#x}\n")
        .replace("zeta\n", f"zeta\n      class: {ids['zeta']:#x}\n")
        .replace("- name: >-", f"- class: {ids['eta']:#x}\n      name: >-")
    )
    assert made.text == expected
    assert classes(made.text) == {**ids, "epsilon": 0x1234}
    assert [(missing.tenant, missing.line) for missing in made.missing] == [
        ("acme", 9),
        ("beta", 15),
        ("gamma", 16),
        ("delta", 18),
        ("zeta", 22),
        ("eta", 24),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_and_the_mark_at_the_beginning_stay(start: str, end: str) -> None:
    text = start + document("acme", "beta").replace("\n", end)
    made = allocated(text)
    assert made.text.startswith(start + "apiVersion")
    assert made.text.count(end) == text.count(end) + 2
    assert made.text.count("\n") == (0 if end == "\r" else made.text.count(end))


def test_a_file_that_ends_in_a_name_gets_a_line_more() -> None:
    made = allocated(document("acme").rstrip("\n"))
    assert made.text.endswith(f"  - name: acme\n    class: {made.assigned['acme']:#x}")


def test_all_in_one_line_is_a_document_too() -> None:
    text = "{apiVersion: kura-shaper/v1, kind: Tenants, region: a, tenants: [{name: acme}, {name: beta}]}"
    assert set(classes(allocated(text).text)) == {"acme", "beta"}


names = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(names, unique=True, max_size=8), st.randoms(use_true_random=False))
def test_whoever_lacks_a_class_gets_one_and_whoever_has_one_keeps_it(found: list[str], random: object) -> None:
    half = len(found) // 2
    # Longer than any of the others, so that none stands twice; and no word that YAML reads as another.
    with_class = {f"has-a-class-{name}": 0x100 + number for number, name in enumerate(found[:half])}
    text = document(*(f'"{name}"' for name in found[half:]), **with_class)
    made = allocated(text)
    ids = classes(made.text)
    assert {name: ids[name] for name in with_class} == with_class
    assert set(made.assigned) == set(found[half:])
    assert made.ledger == Ledger(ids)


def test_the_order_of_tenants_does_not_count() -> None:
    several = [f"t{number}" for number in range(2_000)]
    forwards, backwards = (allocated(document(*order)).assigned for order in (several, several[::-1]))
    assert forwards == backwards
    assert len(set(forwards.values())) == 2_000


def test_five_thousand_tenants_take_seconds() -> None:
    made = allocate(document(*(f"tenant-{n}" for n in range(5_000))), Ledger(), file="t.yaml", now=NOW)
    assert len(set(made.assigned.values())) == 5_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("tenants: [", "not YAML"),
        ("tenants:\n  - name: acme\n", "apiVersion is missing"),
        ("- a\n", "not a mapping"),
        (HEAD + "tenants: acme\n", "not a list"),
        (HEAD + "tenants:\n  - acme\n", "not a mapping"),
        (HEAD + "tenants:\n  - {floor: 1M}\n", "name is missing"),
        (HEAD + "tenants:\n  - name: [a]\n", "class is missing"),
        (HEAD + "tenants:\n  - name: a\n    class:\n", "has no value"),
        (HEAD + "tenants:\n  - name: a\n    class: {a: b}\n", "not a single value"),
        (HEAD + "tenants:\n  - name: a\n    class: twelve\n", "no whole number"),
        (HEAD + "tenants:\n  - name: a\n  - name: a\n", "belongs to"),
        (HEAD + "tenants:\n  - ? [x]\n    : y\n    name: a\n", "no single word"),
        (HEAD + "tenants:\n  - &x {name: a}\n  - *x\n", "anchor"),
        (HEAD + "marks: {mask: lots}\ntenants:\n  - name: a\n", "no whole number"),
        (HEAD + "marks: {mask: {a: b}, x: [y]}\ntenants:\n  - name: a\n", "unknown key"),
        (HEAD + 'tenants:\n  - name: "\\UFFFFFFFF"\n', "not YAML"),
        (HEAD + "tenants:\n  - ? name\n    : >-\n      a\n", "YAML"),
    ],
)
def test_what_is_wrong_otherwise_is_said_as_everybody_else_says_it(text: str, words: str) -> None:
    with pytest.raises(DocumentError, match=words) as caught:
        allocate(text, Ledger(), file="t.yaml", now=NOW)
    assert str(caught.value).startswith("t.yaml")


def test_a_fault_is_said_to_be_where_it_is_and_not_where_it_would_be() -> None:
    text = document("acme", "beta") + "  - name: gamma\n    class: 0x100\n  - name: delta\n    class: 0x100\n"
    with pytest.raises(DocumentError) as caught:
        allocate(text, Ledger(), file="t.yaml", now=NOW)
    assert caught.value.line == 10
    assert "(line 8)" in caught.value.message


def test_a_place_where_a_class_does_not_come_out_is_not_written_to() -> None:
    text = document(acme=0x100) + "#"
    draft = _Draft(text)
    draft.places = [_Place("acme", 5, len(text), " class: ")]
    with pytest.raises(DocumentError, match="write class: 0x200 there yourself"):
        _written(text, draft, {"acme": 0x200}, file="t.yaml")


# The ids.


def test_a_name_comes_to_the_same_id_everywhere_and_for_ever() -> None:
    assert candidate("acme", class_id_max=LAST) == CANDIDATE_OF_ACME
    assert choose("acme", (), class_id_max=LAST) == candidate("acme", class_id_max=LAST)
    assert all(0x100 <= candidate(str(n), class_id_max=0x1FF) <= 0x1FF for n in range(1_000))


def test_a_taken_id_leads_to_the_next_and_from_the_last_to_the_first() -> None:
    first = candidate("acme", class_id_max=LAST)
    assert choose("acme", {first}, class_id_max=LAST) == (first + 1 if first < LAST else 0x100)
    assert choose("acme", set(range(first, LAST + 1)), class_id_max=LAST) == 0x100
    with pytest.raises(UsageError, match="no class is free"):
        choose("acme", set(range(0x100, 0x200)), class_id_max=0x1FF)


def test_an_id_that_a_tenant_has_is_taken() -> None:
    made = allocated(document("acme", beta=CANDIDATE_OF_ACME, gamma=CANDIDATE_OF_ACME + 1))
    assert made.assigned == {"acme": CANDIDATE_OF_ACME + 2}


def test_ids_stay_below_the_mask() -> None:
    text = document(*(f"t{number}" for number in range(200))).replace(
        "tenants:", 'marks: {mask: "0x01ff0000"}\ntenants:'
    )
    assert max(allocated(text).assigned.values()) <= 0x1FF


# The ledger.


def test_a_freed_id_is_nobody_elses_for_seven_days() -> None:
    wanted = candidate("acme", class_id_max=LAST)
    first = allocated(document("acme", other=0x100))
    assert first.ledger == Ledger({"acme": wanted, "other": 0x100})
    gone = allocated(document(other=0x100), first.ledger)
    assert gone.ledger == Ledger({"other": 0x100}, (Freed(wanted, "acme", NOW),))
    # Somebody whose hash leads to the very id: the name is found, not made up.
    rival = next(f"r{n}" for n in range(10_000_000) if candidate(f"r{n}", class_id_max=LAST) == wanted)
    for now, expected in ((NOW + 7 * DAY - timedelta(seconds=1), wanted + 1), (NOW + 7 * DAY, wanted)):
        made = allocated(document(rival), gone.ledger, now=now)
        assert made.assigned == {rival: expected}
    assert made.ledger.freed == (Freed(0x100, "other", NOW + 7 * DAY),)


def test_a_tenant_that_comes_back_gets_its_own_id_back_at_once() -> None:
    ledger = Ledger({}, (Freed(0x4321, "acme", NOW - DAY),))
    made = allocated(document("acme", "beta"), ledger)
    assert made.assigned["acme"] == 0x4321
    assert made.ledger.freed == ()


def test_a_class_that_was_removed_by_mistake_comes_back_as_it_was() -> None:
    made = allocated(document("acme"), Ledger({"acme": 0x4321}))
    assert made.assigned == {"acme": 0x4321}


@pytest.mark.parametrize("mask", ["0x01ff0000", "0xffff0000"])
def test_an_own_id_is_had_back_only_where_it_is_free_and_fits(mask: str) -> None:
    head = document("acme", beta=0x150).replace("tenants:", f'marks: {{mask: "{mask}"}}\ntenants:')
    ledger = Ledger({}, (Freed(0x150, "acme", NOW), Freed(0x4321, "acme", NOW)))
    made = allocate(head, ledger, file="t.yaml", now=NOW)
    assert (made.assigned["acme"] == 0x4321) is (mask == "0xffff0000")


def test_an_id_that_was_given_by_hand_while_it_is_anothers_is_said() -> None:
    ledger = Ledger({"acme": 0x200})
    made = allocated(document(beta=0x200), ledger)
    assert made.early == ("class 0x200 of beta was that of acme, and free again on 2026-12-07",)
    assert made.ledger.freed == (Freed(0x200, "acme", NOW),)


def test_a_ledger_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml.quarantine.yaml"
    for ledger in (Ledger(), Ledger({"no": 0x100, "1e5": 0x101}, (Freed(0x102, "null", NOW), Freed(0x103, "b", NOW)))):
        path.write_text(ledger_text(ledger, document="t.yaml"))
        assert read_ledger(path) == ledger
    assert read_ledger(tmp_path / "none") == Ledger()


LEDGER = "apiVersion: kura-shaper/v1\nkind: ClassLedger\n"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "7", "kind: x", LEDGER, LEDGER + "held: {}\n", LEDGER + "held: []\nfreed: []\n", "\x00"),
        LEDGER.replace("ClassLedger", "Tenants") + "held: {}\nfreed: []\n",
        LEDGER + "held: {a: b}\nfreed: []\n",
        LEDGER + "held: {7: 7}\nfreed: []\n",
        LEDGER + "held: {}\nfreed: [{class: 1, tenant: a}]\n",
        LEDGER + "held: {}\nfreed: [{class: 1, tenant: a, at: soon}]\n",
        LEDGER + "held: {}\nfreed: [{class: 1, tenant: a, at: 2026-11-30}]\n",
    ],
)
def test_a_ledger_that_can_not_be_read_is_never_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger"
    path.write_text(text)
    with pytest.raises(DocumentError, match="no ledger") as caught:
        read_ledger(path)
    assert caught.value.remedy


# The files.


def test_a_file_is_replaced_whole_with_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    before = real.stat().st_ino
    replace_file(link, "new\r\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"new\r\n"
    assert (real.stat().st_mode & 0o7777, real.stat().st_ino != before) == (0o640, True)
    replace_file(tmp_path / "fresh", "x")
    assert (tmp_path / "fresh").stat().st_mode & 0o7777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "link.yaml", "real.yaml"]


def test_a_file_that_can_not_be_replaced_stays_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(RefusedError, match="can't be written"):
        replace_file(tmp_path / "directory", "x")
    with pytest.raises(RefusedError, match="can't be written"):
        replace_file(tmp_path / "none" / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


# The command.


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    before, sys.argv = sys.argv, ["kura-shaper", "tenants", "allocate", *words]
    try:
        with pytest.raises(SystemExit) as caught:
            run()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return (caught.value.code if isinstance(caught.value.code, int) else 0), out, err


def test_check_says_what_is_missing_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(document("acme", beta=0x100))
    wanted = f"{candidate('acme', class_id_max=LAST):#x}"
    assert command(capsys, str(file), "--check") == (1, f"{file}:5: acme has no class; it would be {wanted}\n", "")
    assert file.read_text() == document("acme", beta=0x100)
    assert list(tmp_path.iterdir()) == [file]
    assert command(capsys, str(file)) == (0, f"{file}:5: acme has {wanted}\n", "")
    assert command(capsys, str(file), "--check") == (0, f"{file}: every tenant has a class\n", "")
    assert len(load_tenants(file).tenants) == 2
    stamp = file.stat().st_mtime_ns, ledger_path(file).stat().st_mtime_ns
    assert command(capsys, str(file))[0] == 0
    assert stamp == (file.stat().st_mtime_ns, ledger_path(file).stat().st_mtime_ns)


def test_json_tells_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(document("acme"))
    code, out, _ = command(capsys, str(file), "--check", "--json")
    found = json.loads(out)
    assert (code, found["written"], list(found["assigned"])) == (1, False, ["acme"])
    assert json.loads(command(capsys, str(file), "--json")[1])["written"] is True


def test_an_id_that_is_used_too_early_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(document(acme=0x100))
    assert command(capsys, str(file))[0] == 0
    file.write_text(document(beta=0x100))
    code, _, err = command(capsys, str(file))
    assert (code, "was that of acme" in err) == (1, True)
    assert command(capsys, str(file), "--check", "--quarantine-days", "0")[0] == 0


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_can_not_be_read_is_a_document_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    file = tmp_path / "tenants.yaml"
    if content:
        file.write_bytes(content)
    code, out, err = command(capsys, str(file))
    assert (code, out) == (2, "")
    assert f"{file}: could not be read" in err
