"""Server-side encryption: every write asks for it, however the object is written; reads do not."""

import os
from uuid import uuid4

import pytest

from raymega.errors import StorageError
from raymega.storage.registry import open_store, store_faults
from raymega.storage.s3 import S3Store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server, raw_client

PART = 5 << 20


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture
def prefix():
    return f"p-{uuid4().hex}"


def _heads(endpoint, store, prefix):
    """What the service says of a small and of a multipart object."""
    data = os.urandom(2 * PART)
    store.put("small", [b"x"], overwrite=False)
    store.put("large", [data], overwrite=False)
    assert store.get("large") == data and store.get("small") == b"x"
    raw = raw_client(endpoint)
    return [raw.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}") for key in ("small", "large")]


@pytest.mark.parametrize("kind", ["AES256", "aws:kms"])
def test_objects_of_both_kinds_of_write_are_encrypted(endpoint, prefix, kind):
    with exported({"RAYMEGA_S3_ENCRYPTION": kind}):
        heads = _heads(endpoint, S3Store(BUCKET, prefix, part_bytes=PART), prefix)
    assert [head["ServerSideEncryption"] for head in heads] == [kind, kind]


def test_key_of_ones_own_is_named(endpoint, prefix):
    with exported({"RAYMEGA_S3_ENCRYPTION": "aws:kms", "RAYMEGA_S3_KMS_KEY_ID": "key-7"}):
        heads = _heads(endpoint, S3Store(BUCKET, prefix, part_bytes=PART), prefix)
    assert all(head["SSEKMSKeyId"].endswith("key-7") for head in heads)


def test_profile_sets_it_like_the_environment(endpoint, prefix, tmp_path):
    config = tmp_path / "config"
    config.write_text("[profile vault]\nraymega_s3_encryption = aws:kms\n")
    with exported({"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "vault"}):
        heads = _heads(endpoint, S3Store(BUCKET, prefix, part_bytes=PART), prefix)
    assert [head["ServerSideEncryption"] for head in heads] == ["aws:kms", "aws:kms"]


def test_nothing_is_asked_for_by_itself(endpoint, prefix):
    asked = []
    store = S3Store(BUCKET, prefix)
    store._client.meta.events.register(
        "before-parameter-build.s3.PutObject", lambda params, **_: asked.append(dict(params))
    )
    store.put("k", [b"x"], overwrite=False)
    assert asked and not any("ServerSideEncryption" in each for each in asked)


@pytest.mark.parametrize(
    "values",
    [
        {"RAYMEGA_S3_ENCRYPTION": "aes"},
        {"RAYMEGA_S3_ENCRYPTION": "AES256", "RAYMEGA_S3_KMS_KEY_ID": "key-7"},
        {"RAYMEGA_S3_KMS_KEY_ID": "key-7"},
    ],
    ids=["unknown", "key-without-kms", "key-alone"],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(endpoint, prefix, values):
    uri = f"s3://{BUCKET}/{prefix}"
    with exported(values):
        (fault,) = store_faults(uri)
        assert "RAYMEGA_S3_ENCRYPTION" in fault.fact
        with pytest.raises(StorageError, match="RAYMEGA_S3_ENCRYPTION"):
            open_store(uri).put("k", [b"x"], overwrite=False)
    assert list(open_store(uri).list("")) == []
