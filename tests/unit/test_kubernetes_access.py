"""The API server is reached as the pod or the kubeconfig says, and whatever a connection ends by is one error."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import traceback
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from aiohttp import web
from kubernetes_rig import INSTANCES, Reflecting, in_a_loop, served

from kura_shaper.cli.main import run
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.fake import FakeApi, FakeAsyncClock, refusal
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.reflector import Timing
from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CLASS = "kura.tuist.dev/egress-class-id"


def kubeconfig(path: Path, server: str, *, token: str = "t1", ca: Path | None = None) -> Path:
    """Write a kubeconfig."""
    cluster = {"server": server} | ({"certificate-authority": str(ca)} if ca else {})
    whole = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(whole))
    return path


def certificate(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def account(path: Path, authority: trustme.CA, server: str, *, token: str = "one") -> Access:
    """Return the access of a pod with these files."""
    (path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    (path / "token").write_text(token)
    host, _, port = server.removeprefix("https://").partition(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    return Access(clock=FakeAsyncClock(), environ=environ, service_account=path)


# A pod asks by itself, and who has a kubeconfig by aiohttp; both have to keep the same promises.
both_ways = pytest.mark.parametrize("how", ["pod", "kubeconfig"])


@asynccontextmanager
async def asked(path: Path, how: str, fake: FakeApi, *, before: Any = None) -> AsyncIterator[HttpApi]:
    """Serve an API, and ask it."""
    authority = trustme.CA()
    async with served(fake, before=before, certificate=certificate(authority)) as server:
        access = account(path, authority, server)
        if how == "kubeconfig":
            access = Access(kubeconfig(path / "config", server, ca=path / "ca.crt"), clock=FakeAsyncClock())
        async with HttpApi(access) as api:
            yield api


async def read(api: HttpApi, *, idle_s: float = 5) -> tuple[int, bytes]:
    async with api.get(INSTANCES, {}, idle_s=idle_s, total_s=idle_s) as answer:
        return answer.status, await answer.body()


@both_ways
@in_a_loop
async def test_a_reflector_follows_over_http_what_it_follows_in_memory(tmp_path: Path, how: str) -> None:
    fake = FakeApi()
    for number in range(7):
        fake.put(f"n{number}", {"spec": number})
    async with asked(tmp_path, how, fake) as api:
        known = Reflecting(api, SystemAsyncClock(), timing=Timing(page_objects=3, backoff_least_ns=1_000_000))
        async with known.running():
            await fake.until(lambda: bool(fake.watches))
            fake.put("big", {"spec": "x" * 1_500_000})
            fake.delete("n0")
            await known.until(lambda: "big" in known.objects and "n0" not in known.objects)
            fake.end_watches(ApiError("cut"))
            fake.delete("n1")
            await known.until(lambda: "n1" not in known.objects)
            fake.delete("n2")
            fake.forget()
            fake.end_watches(ApiError("cut"))
            await known.until(lambda: "n2" not in known.objects)


@both_ways
@in_a_loop
async def test_a_hung_connection_is_given_up_on(tmp_path: Path, how: str) -> None:
    release = asyncio.Event()

    async def hang(_: web.Request) -> None:
        await release.wait()

    async with asked(tmp_path, how, FakeApi(), before=hang) as api:
        with pytest.raises(ApiError, match="can't be reached"):
            async with api.get(INSTANCES, {}, idle_s=0.05):
                pass
        release.set()


@both_ways
@in_a_loop
async def test_however_many_watches_are_open_a_list_is_answered(tmp_path: Path, how: str) -> None:
    fake = FakeApi()
    query = {"watch": "1", "resourceVersion": "1"}
    async with asked(tmp_path, how, fake) as api, AsyncExitStack() as watches:
        for _ in range(64):
            await watches.enter_async_context(api.get(INSTANCES, query, idle_s=60))
        assert (await read(api))[0] == 200
        fake.end_watches()


@both_ways
@in_a_loop
async def test_a_watch_that_falls_silent_is_given_up_on(tmp_path: Path, how: str) -> None:
    fake = FakeApi()
    query = {"watch": "1", "resourceVersion": "1"}
    async with (
        asked(tmp_path, how, fake) as api,
        api.get(INSTANCES, query, idle_s=0.2) as answer,
    ):
        await fake.until(lambda: bool(fake.watches))
        fake.bookmark()
        with pytest.raises(ApiError, match="can't be reached"):
            assert [b"BOOKMARK" in line async for line in answer.lines()] == [True]


@both_ways
@in_a_loop
async def test_a_line_beyond_every_object_is_an_error(tmp_path: Path, how: str) -> None:
    fake = FakeApi()
    async with asked(tmp_path, how, fake) as api:
        known = Reflecting(api, FakeAsyncClock())
        async with known.running():
            await fake.until(lambda: bool(fake.watches))
            fake.say(b'"' + b"x" * 9_000_000 + b'"\n')
            await fake.until(lambda: len(fake.asked) == 3)
            assert "can't be reached" in known.reflector.state.failure


@both_ways
@in_a_loop
async def test_refusals_redirects_and_texts_are_handed_on_as_they_are(tmp_path: Path, how: str) -> None:
    fake = FakeApi()

    async def redirect(request: web.Request) -> web.Response | None:
        return web.Response(status=302, headers={"Location": "/elsewhere"}) if request.path == INSTANCES else None

    async with asked(tmp_path, how, fake, before=redirect) as api:
        assert (await read(api))[0] == 302
    assert fake.asked == []
    fake.answer = lambda _: refusal(429, "busy", retry_after_ns=1)
    async with asked(tmp_path, how, fake) as api, api.get(INSTANCES, {}, idle_s=5) as answer:
        assert (answer.status, answer.retry_after_ns) == (429, 7_000_000_000)


@in_a_loop
async def test_a_pods_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    seen: list[str] = []

    async def note(request: web.Request) -> None:
        seen.append(request.headers["Authorization"])

    authority = trustme.CA()
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    async with served(FakeApi(), before=note, certificate=certificate(authority)) as server:
        host, _, port = server.removeprefix("https://").partition(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        access = Access(clock=FakeAsyncClock(), environ=environ, service_account=tmp_path)
        assert access.is_in_cluster
        async with HttpApi(access) as api:
            for token in ("one\n", "two"):
                (tmp_path / "token").write_text(token)
                assert (await read(api))[0] == 200
    assert seen == ["bearer one", "bearer two"]


@in_a_loop
async def test_a_pods_certificate_authority_that_is_replaced_is_followed(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    async with (
        served(FakeApi(), certificate=certificate(new)) as server,
        HttpApi(account(tmp_path, old, server)) as api,
    ):
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await read(api)
        (tmp_path / "ca.crt").write_bytes(new.cert_pem.bytes())
        assert (await read(api))[0] == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"220 smtp.example\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2_000_000,
    ],
)
@in_a_loop
async def test_an_answer_that_is_none_or_is_cut_off_is_an_error(tmp_path: Path, answer: bytes) -> None:
    async with said(tmp_path, answer) as api:
        with pytest.raises(ApiError, match="can't be reached"):
            await read(api)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\none\ntw and more",
        b"HTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\n\r\n2;x=y\r\non\r\n4\r\ne\ntw\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\none\ntw",
    ],
)
@in_a_loop
async def test_a_body_has_its_length_its_chunks_or_the_end_of_the_connection(tmp_path: Path, answer: bytes) -> None:
    async with said(tmp_path, answer) as api:
        assert await read(api) == (200, b"one\ntw")
        async with api.get(INSTANCES, {}, idle_s=5) as found:
            assert [line async for line in found.lines()] == [b"one\n", b"tw"]


@in_a_loop
async def test_a_body_that_ends_with_a_line_has_no_empty_one_after_it(tmp_path: Path) -> None:
    async with (
        said(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\none\n") as api,
        api.get(INSTANCES, {}, idle_s=5) as found,
    ):
        assert [line async for line in found.lines()] == [b"one\n"]


@in_a_loop
async def test_an_answer_that_trickles_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    async with said(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1_000, each_s=0.01) as api:
        with pytest.raises(ApiError, match="TimeoutError"):
            async with api.get(INSTANCES, {}, idle_s=5, total_s=0.3) as answer:
                await answer.body()


@in_a_loop
async def test_a_token_that_no_header_may_have_is_not_sent(tmp_path: Path) -> None:
    async with said(tmp_path, b"", token="s3cr3t\r\nx: y") as api:
        with pytest.raises(ApiError, match="characters") as refused:
            await read(api)
        assert "s3cr3t" not in "".join(traceback.format_exception(refused.value))


@asynccontextmanager
async def said(path: Path, answer: bytes, *, each_s: float = 0, token: str = "one") -> AsyncIterator[HttpApi]:
    """Ask a server that says just these bytes, whatever it is asked; in pieces when they take time."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            size = 10 if each_s else len(answer) + 1
            for at in range(0, len(answer), size):
                writer.write(answer[at : at + size])
                await asyncio.sleep(each_s)
            writer.close()

    authority = trustme.CA()
    server = await asyncio.start_server(answered, "127.0.0.1", 0, ssl=certificate(authority))
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with HttpApi(account(path, authority, f"https://127.0.0.1:{port}", token=token)) as api:
            yield api


@in_a_loop
async def test_a_kubeconfig_is_kept_for_a_minute_and_read_anew_when_it_was_refused(tmp_path: Path) -> None:
    seen: list[str] = []
    fake = FakeApi()

    async def note(request: web.Request) -> None:
        seen.append(request.headers.get("Authorization", ""))

    clock, path = FakeAsyncClock(), tmp_path / "config"
    async with served(fake, before=note) as server, HttpApi(Access(kubeconfig(path, server), clock=clock)) as api:
        await read(api)
        kubeconfig(path, server, token="t2")
        clock.advance_s(59)
        fake.answer = lambda _: refusal(401, "Unauthorized")
        assert (await read(api))[0] == 401
        await read(api)
        kubeconfig(path, server, token="")
        fake.answer = lambda _: None
        await read(api)
        clock.advance_s(60)
        await read(api)
    assert seen == ["Bearer t1", "Bearer t1", "Bearer t2", "", ""]


@in_a_loop
async def test_a_certificate_authority_that_is_replaced_is_followed(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(old.cert_pem.bytes())
    async with served(FakeApi(), certificate=certificate(new)) as server:
        access = Access(kubeconfig(tmp_path / "config", server, ca=trusted), clock=FakeAsyncClock())
        async with HttpApi(access) as api:
            with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
                await read(api)
            trusted.write_bytes(new.cert_pem.bytes())
            assert (await read(api))[0] == 200
            trusted.unlink()
            with pytest.raises(ApiError):
                await read(api)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "a: b", "current-context: c", "\x00", '{"users": 7}', "a"])
@in_a_loop
async def test_a_kubeconfig_that_can_not_be_used_is_said_to_be(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    for access in (
        Access(path, clock=FakeAsyncClock()),
        Access(clock=FakeAsyncClock(), environ={"KUBECONFIG": str(path)}),
    ):
        assert not access.is_in_cluster
        async with HttpApi(access) as api:
            with pytest.raises(ApiError, match="can't be used") as caught:
                await read(api)
        assert "' object" not in caught.value.message
        assert ("--kubeconfig" in caught.value.remedy) == (access._kubeconfig is None)


@in_a_loop
async def test_several_kubeconfigs_are_laid_over_each_other(tmp_path: Path) -> None:
    paths = os.pathsep.join((str(tmp_path / "none"), str(kubeconfig(tmp_path / "config", "http://127.0.0.1:1"))))
    access = Access(clock=FakeAsyncClock(), environ={"KUBECONFIG": paths})
    assert (await access.login()).host == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"token": None}, "No such file"),
        ({"token": b" \n"}, "its token is empty"),
        ({"token": b"\xff"}, "decode"),
        ({"ca.crt": None}, "No such file"),
        ({"ca.crt": b""}, "its ca.crt is empty"),
        ({"KUBERNETES_SERVICE_PORT": b""}, "KUBERNETES_SERVICE_PORT is not set"),
    ],
)
@in_a_loop
async def test_a_pod_that_lacks_something_is_said_to(tmp_path: Path, wrong: dict[str, bytes | None], said: str) -> None:
    for name, content in ({"token": b"one", "ca.crt": b"pem"} | wrong).items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    environ |= {name: "" for name in wrong if name in environ}
    access = Access(clock=FakeAsyncClock(), environ=environ, service_account=tmp_path)
    with pytest.raises(ApiError, match=rf"the service account can't be used: [^\n]*{said}[^\n]*$"):
        await access.login()


@in_a_loop
async def test_a_pods_certificates_that_are_none_are_said_to_be(tmp_path: Path) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    async with HttpApi(Access(clock=FakeAsyncClock(), environ=environ, service_account=tmp_path)) as api:
        with pytest.raises(ApiError, match="can't be reached"):
            await read(api)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "https://10.0.0.1:443"),
        ("fd00::1", "https://[fd00::1]:443"),
        ("kubernetes.default.svc", "https://kubernetes.default.svc:443"),
    ],
)
@in_a_loop
async def test_where_a_pods_api_server_is(tmp_path: Path, host: str, url: str) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    assert (await Access(clock=FakeAsyncClock(), environ=environ, service_account=tmp_path).login()).host == url


def test_a_pod_does_not_pay_for_the_client(tmp_path: Path) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    program = """
import asyncio, pathlib, sys
from kura_shaper.tenants.kubernetes.access import Access
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
access = Access(clock=SystemAsyncClock(), environ=environ, service_account=pathlib.Path(sys.argv[1]))
found = asyncio.run(access.login())
found.certificates
print(found.host, [name for name in ("kubernetes", "aiohttp") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout == "https://10.0.0.1:443 []\n"


@in_a_loop
async def test_without_the_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.aio.client", None)
    with pytest.raises(ApiError, match=r"kura-shaper\[kubernetes\]"):
        await Access(clock=FakeAsyncClock()).login()


def test_a_command_without_a_cluster_does_not_pay_for_the_client() -> None:
    program = """
import sys
import traceback
from kura_shaper.cli.commands import Commands
print(sorted(Commands().items())[0][0], [name for name in ("kubernetes", "aiohttp") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "agent []\n"


# The command.


def exported(tmp_path: Path, capfd: pytest.CaptureFixture[str], fake: FakeApi, *options: str) -> tuple[int, str, str]:
    """Run the export against an API in memory, which a process of its own serves over HTTP."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        asyncio.run(_serve_until_killed(fake, writer))
        os._exit(0)
    os.close(writer)
    try:
        with closing(os.fdopen(reader)) as told:
            config = kubeconfig(tmp_path / "config", told.readline().strip())
        words = ["kura-shaper", "tenants", "export", "--region", "us-east", "--kubeconfig", str(config), *options]
        before, sys.argv = sys.argv, words
        with pytest.raises(SystemExit) as caught:
            run()
    finally:
        sys.argv = before
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    out, err = capfd.readouterr()
    code = caught.value.code
    return code if isinstance(code, int) else 0, out, err


async def _serve_until_killed(fake: FakeApi, writer: int) -> None:
    async with served(fake) as server:
        os.write(writer, f"{server}\n".encode())
        await asyncio.Event().wait()


def region(*accounts: tuple[str, str]) -> FakeApi:
    fake = FakeApi()
    for account, floor in accounts:
        number = 0x100 + len(account)
        spec = {"accountHandle": account, "region": "us-east", "egressGuaranteedMbps": int(floor)}
        fake.put(f"kura-{account}", {"metadata": {"annotations": {CLASS: f"1:{number:x}"}}, "spec": spec})
    return fake


def test_an_export_is_the_document_of_the_region_and_loads_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = region(("acme", "25"), ("beta2", "0"))
    code, out, err = exported(tmp_path, capfd, fake)
    document = parse_tenants(out, file="exported")
    assert (code, err) == (0, "")
    assert [(tenant.name, tenant.class_id) for tenant in document.tenants] == [("acme", 0x104), ("beta2", 0x105)]
    assert exported(tmp_path, capfd, fake)[1] == out


def test_an_export_with_problems_says_them_and_ends_with_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = exported(tmp_path, capfd, region(("acme", "25"), ("beta2", "-1")))
    assert (code, len(parse_tenants(out, file="exported").tenants)) == (1, 1)
    assert err.startswith("kura-shaper: problem: kura/kura-beta2: spec.egressGuaranteedMbps: ")
    code, out, err = exported(tmp_path, capfd, region(("acme", "25"), ("beta2", "-1")), "--json")
    found = json.loads(out)
    assert (code, len(found["problems"]), found["region"]) == (1, 1, "us-east")
    assert len(parse_tenants(found["document"], file="exported").tenants) == 1


def test_an_api_that_can_not_be_read_exports_nothing_and_ends_with_4(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = region(("acme", "25"))
    fake.answer = lambda _: refusal(403, "kurainstances is forbidden")
    code, out, err = exported(tmp_path, capfd, fake, "--namespace", "")
    assert (code, out) == (4, "")
    assert "403: kurainstances is forbidden" in err
