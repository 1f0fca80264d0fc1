"""`render-haproxy --apply` and the certificate that customers are shown, whatever its file is like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from apply_rig import ApplyRig, apply_rig, request
from gateway_rig import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.privileged

MANY = tuple(f"a-customer-with-a-rather-long-name-{number:04}.kura.test" for number in range(450))


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApplyRig]:
    with apply_rig(tmp_path, request.param) as made:
        yield made


def test_a_certificate_of_hundreds_of_names_is_rotated_as_any_other(rig: ApplyRig) -> None:
    """HAProxy cuts what it tells of one, ahead of the fingerprint."""
    for _ in range(2):
        serial = rig.certify("*.kura.test", *MANY)
        assert rig.applied()["decision"] in {"runtime", "reload"}
        assert rig.serial("acme.kura.test") == serial
        assert rig.applied()["decision"] == "none"


def test_a_directory_with_such_a_certificate_comes_to_rest(rig: ApplyRig) -> None:
    directory = rig.directory / "certs"
    directory.mkdir()
    issued = rig.authority.issue_cert("*.kura.test", *MANY).private_key_and_cert_chain_pem.bytes()
    (directory / "big.pem").write_bytes(issued)
    rig.options = ["--certificate-dir", str(directory)]
    rig.applied()
    assert rig.applied()["decision"] == "none"


def test_another_chain_below_the_same_leaf_is_given_too(rig: ApplyRig) -> None:
    rig.applied()
    chain = rig.certificate.read_bytes()
    rig.certificate.write_bytes(chain + rig.authority.cert_pem.bytes())
    worker = rig.pid
    assert rig.applied()["decision"] == "runtime"
    assert rig.applied()["decision"] == "none"
    assert rig.pid == worker


def test_a_certificate_that_does_not_fit_is_told_each_time(rig: ApplyRig) -> None:
    rig.certify("beta.kura.test")
    for _ in range(2):
        ran = rig.apply()
        assert ran.code == 1, ran
        assert [found["tenant"] for found in ran.json["findings"]] == ["acme"]


def test_a_name_that_moves_takes_no_open_connection_along(rig: ApplyRig) -> None:
    """Its mark stays, so its bytes would be counted to the tenant that had the name."""
    hosts = ["acme.kura.test", "wandering.kura.test"]
    rig.write(rig.tenant("acme", hosts=hosts), rig.tenant("beta"))
    rig.applied()
    with rig.connect("wandering.kura.test") as client:
        assert request(client, "wandering.kura.test") == "200 acme"
        rig.write(rig.tenant("acme"), rig.tenant("beta", hosts=["beta.kura.test", "wandering.kura.test"]))
        assert rig.applied()["decision"] == "runtime"
        assert request(client, "wandering.kura.test").startswith("421")
    assert rig.get("wandering.kura.test") == "200 beta"


def test_a_row_that_no_document_could_write_is_put_right(rig: ApplyRig) -> None:
    rig.master.ask(f"@1 add map {rig.out}/current/mark.map zz 5")
    with_odd_key = f"@1 add map {rig.out}/current/mark.map b\\xfccher 5"
    rig.master.ask(with_odd_key)
    rig.write(rig.tenant("acme", **{"class": 0x3FF}), rig.tenant("beta"))
    assert rig.applied()["decision"] == "runtime"
    assert rig.applied()["decision"] == "none"
