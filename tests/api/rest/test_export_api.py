"""Weights exported for certain recipients: only they can read them, not even the server's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyrage
import pytest

from tests.api.rest.service import Api, url
from tests.fake_backend import FakeBackend


async def export(api: Api, recipients: list[str]) -> str:
    run = await api.run(await api.session())
    fields = {"age_encryption_recipients": recipients}
    return await api.save(run, "one", "save_weights_external", **fields)


async def files(api: Api, path: str) -> dict[str, bytes]:
    urls = (await api.get(f"{url(path)}/external_weights_urls"))["urls"]
    stranger = Api(api.app, api.clock)
    return {name: (await stranger.http.get(link)).content for name, link in urls.items()}


async def test_each_recipient_can_read_every_file(alice: Api):
    readers = [pyrage.x25519.Identity.generate() for _ in range(2)]
    path = await export(alice, [str(reader.to_public()) for reader in readers])
    found = await files(alice, path)
    assert list(found) == ["adapter_model.safetensors.age"]
    for reader in readers:
        assert b'"contents": "adapter"' in pyrage.decrypt(
            found["adapter_model.safetensors.age"], [reader]
        )
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(found["adapter_model.safetensors.age"], [pyrage.x25519.Identity.generate()])


async def test_nothing_readable_stays_on_disk(alice: Api, tmp_path: Path):
    await export(alice, [str(pyrage.x25519.Identity.generate().to_public())])
    written = [file for file in (tmp_path / "weights").rglob("*") if file.is_file()]
    assert [file.name for file in written] == ["adapter_model.safetensors.age"]
    assert written[0].read_bytes().startswith(b"age-encryption.org/v1")


async def test_the_size_is_that_of_what_can_be_downloaded(alice: Api):
    path = await export(alice, [str(pyrage.x25519.Identity.generate().to_public())])
    (listed,) = (await alice.get("checkpoints"))["checkpoints"]
    assert listed["size_bytes"] == sum(len(data) for data in (await files(alice, path)).values())


KEY = str(pyrage.x25519.Identity.generate().to_public())


@pytest.mark.parametrize(
    ("recipients", "words"),
    [
        ([KEY, "age1nonsense"], ["[1]", "age1nonsense"]),
        (["ssh-ed25519 AAAA"], ["[0]", "ssh-ed25519 AAAA"]),
        ([""], ["[0]"]),
        (["\x00" + "x" * 500], ["[0]", "..."]),
        ([KEY] * 11, ["11 entries", "10"]),
        ([5], ["age_encryption_recipients"]),
    ],
)
async def test_a_bad_recipient_is_named_before_anything_is_done(
    alice: Api, backend: FakeBackend, recipients: list[Any], words: list[str]
):
    run = await alice.run(await alice.session())
    body = alice.numbered(run, path="one", age_encryption_recipients=recipients)
    refused = await alice.post("save_weights_external", body, 400)
    assert "age_encryption_recipients" in refused["detail"]
    assert all(word in refused["detail"] for word in words)
    assert "save" not in backend.calls
    # The number is used up; the run goes on.
    assert "error" not in (await alice.train(run, 3)).json()


async def test_a_private_key_is_not_repeated(alice: Api):
    secret = str(pyrage.x25519.Identity.generate())
    run = await alice.run(await alice.session())
    body = alice.numbered(run, path="one", age_encryption_recipients=[secret])
    refused = await alice.post("save_weights_external", body, 400)
    assert "private key" in refused["detail"]
    assert secret not in refused["detail"]


async def test_without_recipients_files_are_as_they_are(alice: Api):
    assert list(await files(alice, await export(alice, []))) == ["adapter_model.safetensors"]
