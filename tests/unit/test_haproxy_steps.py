"""How each change is asked for, and what counts as taken."""

from __future__ import annotations

import pytest

from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.haproxy.master import MAX_PAYLOAD_BYTES
from kura_shaper.haproxy.steps import AddHost, MoveServer, RemoveHost, ReplaceCertificate, ReplaceMap, Step

LOST = StateUnknownError("lost")


class Script:
    """A master that answers what a test says to the commands that begin so, and nothing to others."""

    def __init__(self, **answers: str | Exception) -> None:
        self.answers = {key.replace("_", " "): answer for key, answer in answers.items()}
        self.asked: list[tuple[str, str]] = []

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 0) -> str:
        self.asked.append((command, payload))
        answer = next((a for key, a in self.answers.items() if command.startswith(f"@1 {key}")), "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def commands(self) -> list[str]:
        return [command for command, _ in self.asked]


PREPARED = "New version created: 3\n\n"
MAP = ReplaceMap("/g/sni.map", b"a b\nc d\n")
ADD = AddHost("/g/crt-list.txt", "/c/tls.crt", "a.test")
REMOVE = RemoveHost("/g/crt-list.txt", "/c/tls.crt:2", "a.test")
RENEW = ReplaceCertificate("/c/tls.crt", "-----BEGIN CERTIFICATE-----\nAA\n\n-----END CERTIFICATE-----\n\nSECRET\n")
CREATED = "Transaction created for certificate /c/tls.crt!\n\n"


def test_a_map_is_replaced_in_one_moment() -> None:
    master = Script(prepare_map=PREPARED)
    MAP.perform(master)
    assert master.asked == [
        ("@1 prepare map /g/sni.map", ""),
        ("@1 add map @3 /g/sni.map", "a b\nc d\n"),
        ("@1 commit map @3 /g/sni.map", ""),
    ]


def test_a_map_without_rows_is_emptied() -> None:
    master = Script(prepare_map=PREPARED)
    ReplaceMap("/g/sni.map", b"").perform(master)
    assert master.commands == ["@1 prepare map /g/sni.map", "@1 commit map @3 /g/sni.map"]


@pytest.mark.parametrize("count", [1, 350, 351, 352, 5000])
def test_a_long_map_comes_in_whole_lines_that_fit_the_buffer(count: int) -> None:
    rows = "".join(f"host-{n:06}.kura.test tenant-{n:06}\n" for n in range(count))
    master = Script(prepare_map=PREPARED)
    ReplaceMap("/g/sni.map", rows.encode()).perform(master)
    payloads = [payload for command, payload in master.asked if " add map " in command]
    assert "".join(payloads) == rows
    assert all(payload.endswith("\n") and len(payload) <= MAX_PAYLOAD_BYTES for payload in payloads)


def test_the_longest_row_fits() -> None:
    row = "a" * (MAX_PAYLOAD_BYTES - 3) + " b\n"
    master = Script(prepare_map=PREPARED)
    ReplaceMap("/g/sni.map", (row * 3).encode()).perform(master)
    assert [payload for _, payload in master.asked if payload] == [row] * 3


@pytest.mark.parametrize(
    ("step", "answers"),
    [
        (MAP, {"prepare_map": "Unknown map identifier. Please use #<id> or <file>.\n"}),
        (MAP, {"prepare_map": ""}),
        (MAP, {"prepare_map": PREPARED, "add_map": "'x' is no integer\n"}),
        (MAP, {"prepare_map": PREPARED, "commit_map": "Version number out of range.\n"}),
        (ADD, {"add_ssl": "Can't edit the crt-list: certificate '/c/tls.crt' does not exist!\n"}),
        (ADD, {"add_ssl": ""}),
        (REMOVE, {"del_ssl": "Can't delete the entry: line '2' does not exist!\n"}),
        (REMOVE, {}),
        (RENEW, {"set_ssl": "unable to load certificate from file '/c/tls.crt'.\n"}),
        (RENEW, {"set_ssl": CREATED, "commit_ssl": "Can't commit: it is used\n"}),
    ],
)
def test_another_answer_is_a_refusal_in_one_line_with_the_words(step: Step, answers: dict[str, str]) -> None:
    with pytest.raises(RefusedError) as refused:
        step.perform(Script(**answers))
    words = next(reversed([answer for answer in answers.values() if answer != PREPARED] or [""])).strip()
    assert step.describe() in str(refused.value)
    assert (words or "`nothing`") in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_a_refused_map_is_not_committed() -> None:
    master = Script(prepare_map=PREPARED, add_map="no\n")
    with pytest.raises(RefusedError):
        MAP.perform(master)
    assert not any("commit" in command for command in master.commands)


def test_hosts_are_added_and_removed() -> None:
    master = Script(
        add_ssl="Inserting certificate '/c/tls.crt' in crt-list.\nSuccess!\n",
        del_ssl="Entry '/c/tls.crt' deleted in crtlist '/g'!\n",
    )
    ADD.perform(master)
    REMOVE.perform(master)
    assert master.asked == [
        ("@1 add ssl crt-list /g/crt-list.txt", "/c/tls.crt a.test\n"),
        ("@1 del ssl crt-list /g/crt-list.txt /c/tls.crt:2", ""),
    ]


def test_a_certificate_is_sent_without_empty_lines_which_would_end_it() -> None:
    master = Script(set_ssl=CREATED, commit_ssl="Committing /c/tls.crt\nSuccess!\n")
    RENEW.perform(master)
    (_, payload), (commit, _) = master.asked
    assert payload == "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\nSECRET\n"
    assert commit == "@1 commit ssl cert /c/tls.crt"
    assert "SECRET" not in RENEW.describe()


@pytest.mark.parametrize(
    "answers",
    [
        {"set_ssl": "no\n"},
        {"set_ssl": LOST},
        {"set_ssl": CREATED, "commit_ssl": "no\n"},
        {"set_ssl": CREATED, "commit_ssl": LOST},
        {"set_ssl": LOST, "abort_ssl": LOST},
    ],
)
def test_a_certificate_that_is_not_taken_leaves_no_transaction_open(answers: dict[str, str | Exception]) -> None:
    master = Script(**answers)
    with pytest.raises((RefusedError, StateUnknownError)):
        RENEW.perform(master)
    assert master.commands[-1] == "@1 abort ssl cert /c/tls.crt"


@pytest.mark.parametrize(("check_port", "address"), [(0, "10.0.0.1"), (4001, "2001:db8::1")])
def test_a_server_moves_with_the_port_that_it_is_checked_at(check_port: int, address: str) -> None:
    master = Script()
    MoveServer("acme_http/p0", address, 4000, check_port).perform(master)
    assert master.commands == [
        f"@1 set server acme_http/p0 addr {address} port 4000",
        f"@1 set server acme_http/p0 check-port {check_port}",
    ]
