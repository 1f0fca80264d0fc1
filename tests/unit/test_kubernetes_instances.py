"""KuraInstances come to one tenant for each account; what is wrong with one is said, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tenants.kubernetes.instances import Compiled, RegionSettings, compile_region
from kura_shaper.tenants.kubernetes.objects import Effect, Instance, read_instance, read_node
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tenants.text import document_text
from kura_shaper.units import Rate

US_EAST = RegionSettings(region="us-east")
CLASS = "kura.tuist.dev/egress-class-id"
CEILING = "kubernetes.io/egress-bandwidth"
read = partial(read_instance, marks=MarkLayout())


def instance(account: str, class_id: int | str | None, /, name: str = "", **spec: Any) -> Instance:
    """Return a KuraInstance as it is read; a value of None takes a field of the spec away."""
    annotations = {} if class_id is None else {CLASS: f"1:{class_id:x}" if isinstance(class_id, int) else class_id}
    whole = {
        "accountHandle": account,
        "tenantID": account,
        "region": "us-east",
        "image": "kura:1",
        "publicHost": f"{account}.kura.example",
        "egressGuaranteedMbps": 25,
        "podAnnotations": {CEILING: "1500M"},
    } | spec
    raw = {"metadata": {"annotations": annotations}, "spec": {k: v for k, v in whole.items() if v is not None}}
    return read("kura", name or f"kura-{account}-us-east-1", raw)


def compiled(*instances: Instance, previous: TenantsDocument | None = None) -> Compiled:
    """Return what instances come to, which loads again to the same values whatever they say."""
    made = compile_region(instances, US_EAST, previous=previous)
    assert parse_tenants(document_text(made.document), file="exported") == made.document
    assert compile_region(reversed(instances), US_EAST, previous=previous) == made, "the order does not count"
    return made


def tenants(made: Compiled) -> dict[str, Tenant]:
    return {tenant.name: tenant for tenant in made.document.tenants}


def said(made: Compiled) -> list[tuple[str, str, Effect]]:
    return [(problem.name, problem.path, problem.effect) for problem in made.problems]


def test_an_instance_with_everything_is_a_tenant_with_everything() -> None:
    raw = {
        "metadata": {"name": "kura-acme-us-east-1", "namespace": "kura", "annotations": {CLASS: "1:2a7"}},
        "spec": {
            "accountHandle": "acme",
            "tenantID": "acme",
            "region": "us-east",
            "image": "ghcr.io/example/kura:0.40.0",
            "replicas": 2,
            "publicHost": "acme-us-east-1.kura.example",
            "stableHost": "acme.cache.example",
            "clientHostAliases": ["acme-old-us-east-1.kura.example", "ACME-us-east-1.kura.example"],
            "egressGuaranteedMbps": 25,
            "podAnnotations": {CEILING: "1500M"},
            "mesh": True,
            "meshPublicPeerHost": "peer.acme-us-east-1.kura.example",
        },
    }
    made = compiled(read("kura", "kura-acme-us-east-1", raw))
    server = Endpoint("kura-acme-us-east-1-haproxy.kura.svc.cluster.local", 4000, is_dns_name=True)
    peer = Endpoint("kura-acme-us-east-1.kura.svc.cluster.local", 7443, is_dns_name=True)
    acme = Tenant(
        name="acme",
        class_id=0x2A7,
        floor=Rate(25_000_000),
        ceiling=Rate(1_500_000_000),
        hosts=("acme-us-east-1.kura.example", "acme-old-us-east-1.kura.example", "acme.cache.example"),
        peer_hosts=("peer.acme-us-east-1.kura.example",),
        backends=Backends(http=server, grpc=server, peer=peer),
    )
    assert made == Compiled(TenantsDocument("us-east", (acme,)), ())


def test_an_instance_with_nothing_more_than_it_must_have_has_no_floor_and_the_default_ceiling() -> None:
    raw = {"metadata": {"annotations": {CLASS: "1:100"}}, "spec": {"accountHandle": "acme", "region": "us-east"}}
    made = compile_region([read("kura", "a", raw)], replace(US_EAST, ceiling=Rate(500_000_000)))
    (acme,) = made.document.tenants
    assert (acme.floor, acme.ceiling, acme.hosts, made.problems) == (Rate(0), Rate(500_000_000), (), ())


def test_instances_of_other_regions_are_no_concern_of_this_one() -> None:
    made = compiled(instance("acme", 0x100), instance("beta", "nonsense", region="eu-west", egressGuaranteedMbps=-1))
    assert (list(tenants(made)), made.problems) == (["acme"], ())


def test_tenants_are_sorted_by_class() -> None:
    made = compiled(instance("acme", 0x300), instance("beta", 0x100), instance("gamma", 0x200))
    assert [tenant.name for tenant in made.document.tenants] == ["beta", "gamma", "acme"]


# One account, several instances.


@pytest.mark.case("F55")
def test_instances_and_replicas_never_multiply_what_is_promised_and_the_largest_counts() -> None:
    made = compiled(
        instance("acme", 0x100, "a", replicas=3, egressGuaranteedMbps=25, podAnnotations={CEILING: "500M"}),
        instance("acme", 0x100, "b", replicas=3, egressGuaranteedMbps=40, podAnnotations={CEILING: "400M"}),
        instance("acme", None, "c", egressGuaranteedMbps=None, podAnnotations=None),
    )
    (acme,) = made.document.tenants
    assert (acme.floor, acme.ceiling, made.problems) == (Rate(40_000_000), Rate(500_000_000), ())


def test_of_several_instances_the_first_with_names_serves_all_names() -> None:
    made = compiled(
        instance("acme", 0x100, "a", publicHost=None),
        instance("acme", 0x100, "b", publicHost="b.kura.example", meshPublicPeerHost="p.kura.example"),
        instance("acme", 0x100, "c", publicHost="c.kura.example"),
    )
    (acme,) = made.document.tenants
    assert acme.hosts == ("b.kura.example", "c.kura.example")
    assert str(acme.backends.http) == "b-haproxy.kura.svc.cluster.local:4000"
    assert str(acme.backends.peer) == "b.kura.svc.cluster.local:7443"


def test_an_account_whose_instances_disagree_on_the_class_keeps_the_one_that_is_in_force() -> None:
    both = (instance("acme", 0x200, "a"), instance("acme", 0x100, "b"))
    before = compiled(instance("acme", 0x100, "b")).document
    assert tenants(compiled(*both))["acme"].class_id == 0x200
    made = compiled(*both, previous=before)
    assert tenants(made)["acme"].class_id == 0x100
    assert said(made) == [("a", f'metadata.annotations["{CLASS}"]', Effect.PART)]


def test_one_bad_instance_of_an_account_does_not_take_the_tenant_from_the_other() -> None:
    made = compiled(instance("acme", 0x100, "a"), instance("acme", 0x100, "b", egressGuaranteedMbps=-5))
    assert tenants(made)["acme"].floor == Rate(25_000_000)
    assert said(made) == [("b", "spec.egressGuaranteedMbps", Effect.PART)]


def test_while_one_instance_can_not_be_read_the_others_do_not_make_the_tenant_less_than_it_was() -> None:
    one, other = instance("acme", 0x100, "a"), instance("acme", 0x100, "b", egressGuaranteedMbps=40)
    before = compiled(one, other).document
    made = compiled(one, instance("acme", 0x100, "b", egressGuaranteedMbps=-40), previous=before)
    assert tenants(made)["acme"].floor == Rate(40_000_000)
    assert said(made) == [("b", "spec.egressGuaranteedMbps", Effect.LAST_GOOD)]


# What can't be used.

BAD = [
    pytest.param({"egressGuaranteedMbps": -1}, "spec.egressGuaranteedMbps", id="floor below 0"),
    pytest.param({"egressGuaranteedMbps": 2**31}, "spec.egressGuaranteedMbps", id="floor beyond int32"),
    pytest.param({"egressGuaranteedMbps": True}, "spec.egressGuaranteedMbps", id="floor a boolean"),
    pytest.param({"egressGuaranteedMbps": "25"}, "spec.egressGuaranteedMbps", id="floor a text"),
    *(
        pytest.param({"podAnnotations": {CEILING: value}}, f'spec.podAnnotations["{CEILING}"]', id=f"ceiling {value}")
        for value in ("1,5G", "1500 M", "1500Mbit", "-1M", "0", "1500", "inf", "0.5", 1500, "9" * 30)
    ),
    pytest.param({"clientCIDRs": ["10.0.0.0/8", "10.0.0.0/33"]}, "spec.clientCIDRs[1]", id="network"),
    pytest.param({"clientCIDRs": "10.0.0.0/8"}, "spec.clientCIDRs", id="networks no list"),
]


@pytest.mark.parametrize(("spec", "path"), BAD)
def test_what_can_not_be_read_leaves_the_tenant_as_it_was_and_never_without_a_limit(
    spec: dict[str, Any], path: str
) -> None:
    before = compiled(instance("acme", 0x100, podAnnotations={CEILING: "500M"}), instance("beta", 0x200)).document
    made = compiled(instance("acme", 0x100, **spec), instance("beta", 0x200), previous=before)
    assert made.document == before
    assert said(made) == [("kura-acme-us-east-1", path, Effect.LAST_GOOD)]


@pytest.mark.parametrize(("spec", "path"), BAD)
def test_a_tenant_that_never_was_good_is_left_out_and_said_and_nobody_else_notices(
    spec: dict[str, Any], path: str
) -> None:
    made = compiled(instance("acme", 0x100, **spec), instance("beta", 0x200))
    assert list(tenants(made)) == ["beta"]
    assert said(made) == [("kura-acme-us-east-1", path, Effect.LEFT_OUT)]
    (problem,) = made.problems
    assert problem.is_loss
    assert problem.remedy
    assert str(problem).isprintable()
    assert str(problem).startswith(f"kura/kura-acme-us-east-1: {path}: ")


def test_ceilings_in_every_notation_of_a_quantity_are_read() -> None:
    for text, bits in (("1500M", 1_500_000_000), ("1.5G", 1_500_000_000), ("1Gi", 2**30), ("64000", 64_000)):
        made = compiled(instance("acme", 0x100, egressGuaranteedMbps=0, podAnnotations={CEILING: text}))
        assert tenants(made)["acme"].ceiling == Rate(bits)


def test_a_floor_above_the_ceiling_counts_for_both_and_is_said() -> None:
    made = compiled(instance("acme", 0x100, egressGuaranteedMbps=600, podAnnotations={CEILING: "500M"}))
    assert tenants(made)["acme"].ceiling == Rate(600_000_000)
    assert said(made) == [("kura-acme-us-east-1", f'spec.podAnnotations["{CEILING}"]', Effect.NONE)]
    assert not made.problems[0].is_loss


CLASS_PATH = f'metadata.annotations["{CLASS}"]'


@pytest.mark.parametrize(
    "text", [None, "", "2a7", "1:", "1:g", "2:2a7", "1:2a7f0", "1:ff", "1:ffff", "1:0x2a7", " 1:2a7"]
)
def test_without_a_usable_class_there_is_no_tenant_but_the_last_good_one(text: str | None) -> None:
    before = compiled(instance("acme", 0x2A7)).document
    made = compiled(instance("acme", text))
    assert (made.document.tenants, said(made)) == ((), [("kura-acme-us-east-1", CLASS_PATH, Effect.LEFT_OUT)])
    made = compiled(instance("acme", text), previous=before)
    assert (made.document, said(made)) == (before, [("kura-acme-us-east-1", CLASS_PATH, Effect.LAST_GOOD)])


def test_another_problem_of_an_instance_does_not_hide_that_it_has_no_class() -> None:
    made = compiled(instance("acme", None, stableHost="*.example"))
    name = "kura-acme-us-east-1"
    assert said(made) == [(name, "spec.stableHost", Effect.PART), (name, CLASS_PATH, Effect.LEFT_OUT)]


def test_a_class_must_fit_the_marks() -> None:
    small = MarkLayout(0x1FF0000)
    settings = replace(US_EAST, marks=small)
    raw = {"metadata": {"annotations": {CLASS: "1:200"}}, "spec": {"accountHandle": "acme", "region": "us-east"}}
    made = compile_region([read_instance("kura", "a", raw, marks=small)], settings)
    assert (made.document.tenants, [p.effect for p in made.problems]) == ((), [Effect.LEFT_OUT])
    # A tenant of an earlier run, when the marks were wider, does not fit either.
    before = TenantsDocument("us-east", (Tenant("acme", 0x200, Rate(0), Rate(10**9)),))
    made = compile_region([read_instance("kura", "a", raw, marks=small)], settings, previous=before)
    assert (made.document.tenants, [p.effect for p in made.problems]) == ((), [Effect.LEFT_OUT])


def test_of_accounts_with_one_class_the_first_by_name_has_it() -> None:
    accounts = (instance("beta", 0x100), instance("acme", 0x100), instance("gamma", 0x100), instance("delta", 0x101))
    made = compiled(*accounts)
    assert list(tenants(made)) == ["acme", "delta"]
    assert said(made) == [
        ("kura-beta-us-east-1", CLASS_PATH, Effect.LEFT_OUT),
        ("kura-gamma-us-east-1", CLASS_PATH, Effect.LEFT_OUT),
    ]
    assert "belongs to acme" in made.problems[0].message


def test_an_account_that_lost_its_class_to_another_stays_where_it_was_while_nobody_has_that() -> None:
    before = compiled(instance("beta", 0x200), instance("gamma", 0x300)).document
    made = compiled(
        instance("acme", 0x100),
        instance("beta", 0x100),
        instance("gamma", 0x100),
        instance("zeta", 0x300),
        previous=before,
    )
    classes = {name: tenant.class_id for name, tenant in tenants(made).items()}
    assert classes == {"acme": 0x100, "beta": 0x200, "zeta": 0x300}
    effects = {problem.name: problem.effect for problem in made.problems}
    assert effects == {"kura-beta-us-east-1": Effect.LAST_GOOD, "kura-gamma-us-east-1": Effect.LEFT_OUT}


def test_a_tenant_as_it_was_never_takes_a_class_from_one_that_is_good_now() -> None:
    before = compiled(instance("acme", 0x100)).document
    made = compiled(instance("acme", 0x100, egressGuaranteedMbps=-1), instance("beta", 0x100), previous=before)
    assert list(tenants(made)) == ["beta"]


@pytest.mark.parametrize("handle", ["", None, "Acme", "a" * 51, "a_b", 7, "acme\n- name: evil"])
def test_an_account_that_can_not_be_named_keeps_every_tenant_that_may_be_it(handle: Any) -> None:
    before = compiled(instance("acme", 0x100), instance("beta", 0x200)).document
    bad = read(
        "kura",
        "kura-x",
        {"metadata": {"annotations": {CLASS: "1:100"}}, "spec": {"accountHandle": handle, "region": "us-east"}},
    )
    made = compiled(bad, instance("beta", 0x200))
    assert (list(tenants(made)), said(made)) == (["beta"], [("kura-x", "spec.accountHandle", Effect.LEFT_OUT)])
    made = compiled(bad, instance("beta", 0x200), previous=before)
    assert made.document == before
    assert said(made)[1:] == [("kura-x", "spec.accountHandle", Effect.LAST_GOOD)]
    # But not where its class went to somebody else.
    made = compiled(bad, instance("beta", 0x200), instance("gamma", 0x100), previous=before)
    assert list(tenants(made)) == ["gamma", "beta"]


def test_an_instance_whose_region_can_not_be_read_keeps_its_tenant() -> None:
    before = compiled(instance("acme", 0x100)).document
    made = compiled(instance("acme", 0x100, region=None), previous=before)
    assert (made.document, said(made)) == (before, [("kura-acme-us-east-1", "spec.region", Effect.LAST_GOOD)])


def test_the_last_good_document_of_another_region_says_nothing_about_this_one() -> None:
    before = replace(compiled(instance("acme", 0x100)).document, region="eu-west")
    assert compiled(instance("acme", None), previous=before).document.tenants == ()


def test_a_tenant_whose_instances_are_gone_is_gone() -> None:
    before = compiled(instance("acme", 0x100), instance("beta", 0x200)).document
    assert list(tenants(compiled(instance("beta", 0x200), previous=before))) == ["beta"]


# Names.


def test_names_that_are_none_are_left_out_and_the_others_are_served() -> None:
    made = compiled(
        instance("acme", 0x100, clientHostAliases=["*.kura.example", "b.kura.example", 7], stableHost="10.0.0.1")
    )
    assert tenants(made)["acme"].hosts == ("acme.kura.example", "b.kura.example")
    name = "kura-acme-us-east-1"
    assert said(made) == [
        (name, "spec.clientHostAliases[0]", Effect.PART),
        (name, "spec.clientHostAliases[2]", Effect.PART),
        (name, "spec.stableHost", Effect.PART),
    ]


def test_a_name_belongs_to_the_first_account_and_a_tenant_as_it_was_comes_last() -> None:
    made = compiled(
        instance("beta", 0x200, publicHost="x.kura.example"),
        instance("acme", 0x100, publicHost="x.kura.example", meshPublicPeerHost="x.kura.example"),
    )
    assert {name: tenant.hosts for name, tenant in tenants(made).items()} == {"acme": ("x.kura.example",), "beta": ()}
    assert tenants(made)["acme"].peer_hosts == ()
    assert [problem.effect for problem in made.problems] == [Effect.PART, Effect.PART]
    bad = instance("acme", 0x100, publicHost="x.kura.example", egressGuaranteedMbps=-1)
    beta = instance("beta", 0x200, publicHost="x.kura.example")
    before = compiled(instance("acme", 0x100, publicHost="x.kura.example")).document
    made = compiled(bad, beta, previous=before)
    assert {name: tenant.hosts for name, tenant in tenants(made).items()} == {"acme": (), "beta": ("x.kura.example",)}
    lost = read("kura", "kura-x", {})
    made = compiled(lost, beta, previous=before)
    assert {name: tenant.hosts for name, tenant in tenants(made).items()} == {"acme": (), "beta": ("x.kura.example",)}


def test_a_private_instance_is_served_by_its_private_name_to_its_networks_only() -> None:
    made = compiled(
        instance(
            "acme", 0x100, private=True, privateHost="acme.private.example", clientCIDRs=["2001:db8::/32", "10.0.0.0/8"]
        )
    )
    (acme,) = made.document.tenants
    assert acme.hosts == ("acme.private.example",)
    assert acme.client_cidrs == (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))
    assert made.problems == ()


def test_a_private_name_without_networks_is_never_open_to_everybody() -> None:
    made = compiled(instance("acme", 0x100, privateHost="acme.private.example"))
    assert tenants(made)["acme"].hosts == ("acme.kura.example",)
    assert said(made) == [("kura-acme-us-east-1", "spec.privateHost", Effect.PART)]


def test_networks_of_an_instance_are_for_all_of_its_names() -> None:
    made = compiled(instance("acme", 0x100, privateHost="acme.private.example", clientCIDRs=["10.0.0.0/8"]))
    (acme,) = made.document.tenants
    assert acme.hosts == ("acme.kura.example", "acme.private.example")
    assert acme.client_cidrs == (ip_network("10.0.0.0/8"),)


def test_where_open_and_restricted_names_of_an_account_meet_the_restricted_ones_go() -> None:
    private = instance("acme", 0x100, "b", private=True, privateHost="p.private.example", clientCIDRs=["10.0.0.0/8"])
    made = compiled(instance("acme", 0x100, "a"), private)
    (acme,) = made.document.tenants
    assert (acme.hosts, acme.client_cidrs) == (("acme.kura.example",), ())
    assert said(made) == [("b", "spec.clientCIDRs", Effect.PART)]


def test_a_name_that_makes_no_service_leaves_the_tenant_its_promise_and_takes_its_names() -> None:
    made = compiled(instance("acme", 0x100, "a" * 60, meshPublicPeerHost="p.kura.example"))
    (acme,) = made.document.tenants
    assert (acme.hosts, acme.backends.http, acme.peer_hosts) == ((), None, ("p.kura.example",))
    assert said(made) == [("a" * 60, "metadata.name", Effect.PART)]


def test_a_region_whose_last_instance_went_keeps_its_tenants_and_says_so_once() -> None:
    before = compiled(instance("acme", 0x100), instance("beta", 0x200)).document
    for others in ((), (instance("zeta", 0x300, region="eu-west"),)):
        made = compiled(*others, previous=before)
        assert made.document == before
        [problem] = made.problems
        assert (problem.effect, "2 tenants stay" in str(problem)) == (Effect.LAST_GOOD, True)
    # Of a region that never had any, and of another one, there is nothing to keep.
    assert compiled() == compiled(previous=TenantsDocument("us-east", ()))
    assert compiled(previous=replace(before, region="eu-west")).document.tenants == ()
    assert compiled(instance("zeta", 0x300), previous=before).document.tenants[0].name == "zeta"


def test_a_gateway_without_ports_has_no_names() -> None:
    settings = replace(US_EAST, gateway=Gateway(https_ports=(), peer_ports=()))
    made = compile_region([instance("acme", 0x100, meshPublicPeerHost="p.kura.example")], settings)
    (acme,) = made.document.tenants
    assert (acme.hosts, acme.peer_hosts) == ((), ())


def test_services_and_their_domain_are_what_they_are_said_to_be() -> None:
    settings = replace(
        US_EAST, cluster_domain="k8s.example", http_service="{instance}-h", peer_service="{instance}-peer"
    )
    made = compile_region([instance("acme", 0x100, "a", meshPublicPeerHost="p.kura.example")], settings)
    backends = made.document.tenants[0].backends
    assert str(backends.grpc) == "a-h.kura.svc.k8s.example:4000"
    assert str(backends.peer) == "a-peer.kura.svc.k8s.example:7443"


def test_settings_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="label"):
        RegionSettings(region="US East")
    with pytest.raises(UsageError, match="hostname"):
        RegionSettings(region="us-east", cluster_domain="a b")


ODD_KEYS = (
    *("accountHandle", "region", "publicHost", "stableHost", "privateHost", "private", "clientHostAliases"),
    *("clientCIDRs", "egressGuaranteedMbps", "podAnnotations", "meshPublicPeerHost"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
odd_objects = st.fixed_dictionaries(
    {},
    optional={
        "metadata": json_values
        | st.fixed_dictionaries(
            {"annotations": st.dictionaries(st.sampled_from([CLASS]), json_values | st.just("1:100"))}
        ),
        "spec": json_values
        | st.dictionaries(
            st.sampled_from(ODD_KEYS),
            json_values
            | st.sampled_from(["acme", "us-east", "a.example", ["a.example"], ["10.0.0.0/8"], {CEILING: "1G"}]),
        ),
        "status": json_values,
    },
)


@settings(deadline=None)
@given(st.lists(odd_objects, max_size=4))
def test_no_object_however_odd_fails_anything_but_itself(objects: list[dict[str, Any]]) -> None:
    odd = [read("kura", f"x{number}", raw) for number, raw in enumerate(objects)]
    beta = instance("beta", 0xFFF, publicHost="beta.kura.example")
    made = compiled(beta, *odd)
    assert tenants(made)["beta"] == tenants(compiled(beta))["beta"]
    assert all(str(problem).isprintable() for problem in made.problems)
    read_node("box-1", objects[0] if objects else {})


# The node.


def node(capacity: object = None, pin: object = None) -> Any:
    annotations = {} if pin is None else {"tuist.dev/egress-mbps-override": pin, "a": "b"}
    return read_node(
        "box-1",
        {
            "metadata": {"annotations": annotations},
            "status": {"capacity": {} if capacity is None else {"tuist.dev/egress-mbps": capacity}},
        },
    )


@pytest.mark.parametrize(
    ("capacity", "bits"),
    [("3k", 3_000_000_000), ("3000", 3_000_000_000), ("1", 1_000_000), ("1500m", 1_500_000), (1000, 1_000_000_000)],
)
def test_the_budget_is_the_nodes_capacity_in_mbit(capacity: object, bits: int) -> None:
    assert (node(capacity).budget, node(capacity).problems) == (Rate(bits), ())


def test_a_pin_goes_before_the_capacity_and_may_stand_alone() -> None:
    assert node("3k", pin="500").budget == Rate(500_000_000)
    assert node(None, pin="5k").budget == Rate(5_000_000_000)
    assert node("3k", pin="500").annotations == (("a", "b"), ("tuist.dev/egress-mbps-override", "500"))


def test_a_node_without_capacity_has_no_budget_and_no_problem() -> None:
    assert (node().budget, node().problems) == (None, ())
    assert read_node("box-1", {}).budget is None


@pytest.mark.parametrize("text", ["", "3kk", "0", "-1", "lots", "0.1u", True, [1], 1.5])
def test_a_budget_that_can_not_be_read_is_a_problem_and_no_budget_is_made_up(text: Any) -> None:
    for facts in (node(text), node("3k", pin=text)):
        if text == "":  # empty is absent
            assert facts.problems == ()
            continue
        assert facts.budget is None
        (problem,) = facts.problems
        assert problem.effect is Effect.LAST_GOOD
        assert str(problem).startswith("box-1: ")


# The text.


def test_every_word_of_a_document_is_read_as_the_text_that_it_is() -> None:
    odd = ("no", "on", "y", "null", "1e5", "0x10", "12", "1-2", "2001-01-01", "a", "acme")
    document = TenantsDocument(
        "no",
        tuple(Tenant(name, 0x100 + number, Rate(number), Rate(10**9 + number)) for number, name in enumerate(odd)),
        gateway=Gateway(https_ports=(443, 8443), peer_ports=(), grpc_prefixes=("/a.", "/b-C_d.1/")),
    )
    text = document_text(document)
    assert parse_tenants(text, file="t.yaml") == document
    assert document_text(parse_tenants(text, file="t.yaml")) == text
    assert "- name: acme\n" in text


def test_the_text_of_nobody_is_a_document_too() -> None:
    empty = TenantsDocument("us-east", ())
    assert parse_tenants(document_text(empty), file="t.yaml") == empty


def test_addresses_networks_and_names_come_back() -> None:
    tenant = Tenant(
        "acme",
        0x100,
        Rate(25_000_000),
        Rate(1_234_567_891),
        hosts=("1.a.example", "a.example"),
        peer_hosts=("p.example",),
        client_cidrs=(ip_network("10.0.0.0/8"), ip_network("2001:db8::/32")),
        backends=Backends(
            http=Endpoint("10.0.0.5", 4000), grpc=Endpoint("2001:db8::5", 4001), peer=Endpoint("p.example", 7443, True)
        ),
    )
    document = TenantsDocument("us-east", (tenant,))
    assert parse_tenants(document_text(document), file="t.yaml") == document
