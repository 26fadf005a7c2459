"""infra/aws: the files parse, and a node's policy grants what the store calls and nothing else of S3."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import hcl2
import pytest
import s3_servers
from botocore.client import BaseClient

from art_sky.errors import ObjectNotFound
from art_sky.store.s3 import S3Store
from art_sky.store.s3_transfer import UPLOAD_PART

AWS = Path(__file__).parents[2] / "infra" / "aws"
# Operation -> the action it needs (AWS, "Actions, resources, and condition keys for Amazon S3").
ACTIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}


def policy() -> list[dict[str, Any]]:
    text = (AWS / "node-policy.json.tftpl").read_text().replace("${bucket}", "runs").replace("${prefix}", "team/a")
    statements: list[dict[str, Any]] = json.loads(text)["Statement"]
    return statements


def actions(statement: dict[str, Any]) -> set[str]:
    action = statement["Action"]
    return {action} if isinstance(action, str) else set(action)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The S3 operations of this process from now on."""
    seen: set[str] = set()
    original = BaseClient._make_api_call

    def watched(self: Any, operation_name: str, api_params: Any) -> Any:
        seen.add(operation_name)
        return original(self, operation_name, api_params)

    monkeypatch.setattr(BaseClient, "_make_api_call", watched)
    return seen


def test_the_policy_grants_what_the_store_calls_and_no_more(moto: str, called: set[str], tmp_path: Path) -> None:
    store = S3Store(f"s3://{s3_servers.BUCKET}/policy-{uuid.uuid4().hex}?endpoint_url={moto}")
    large = tmp_path / "large"
    large.write_bytes(b"\0" * (UPLOAD_PART + 1))
    store.put("large", large)
    store.swap("small", b"2", store.create("small", b"1"))
    store.info("small")
    assert store.get("small").data == b"2"
    with store.open("large") as stream:
        assert len(stream.read()) == UPLOAD_PART + 1
    assert len(list(store.list(""))) == 2
    store.acquire("lease", "test").release()
    s3_servers.client(moto).create_multipart_upload(Bucket=s3_servers.BUCKET, Key=f"{_prefix(store)}/left")
    assert store.abort_uploads("", time.time() + 60) == 1
    store.delete("small")
    with pytest.raises(ObjectNotFound):
        store.get("small")

    granted = {a for statement in policy() for a in actions(statement) if a.startswith("s3:")}
    assert {ACTIONS[operation] for operation in called} == granted


def test_objects_are_granted_under_the_prefix_only() -> None:
    for statement in policy():
        if statement["Resource"] == "arn:aws:s3:::runs":
            assert statement["Condition"]["StringLike"]["s3:prefix"] == ["team/a", "team/a/*"]
        elif any(a.startswith("s3:") for a in actions(statement)):
            assert statement["Resource"] == "arn:aws:s3:::runs/team/a/*"


def test_a_node_may_end_labelled_machines_only() -> None:
    (ends,) = [s for s in policy() if "ec2:TerminateInstances" in actions(s)]
    assert ends["Condition"] == {"StringEquals": {"aws:ResourceTag/art-sky": "1"}}
    assert {a for s in policy() for a in actions(s) if a.startswith("ec2:")} == {
        "ec2:TerminateInstances", "ec2:StopInstances", "ec2:DescribeInstances"
    }  # fmt: skip


def test_the_terraform_files_parse_and_their_outputs_name_what_a_launch_takes() -> None:
    parsed = {file.name: hcl2.loads(file.read_text()) for file in sorted(AWS.glob("*.tf"))}
    assert sorted(parsed) == ["main.tf", "outputs.tf", "variables.tf"]
    declared = {name.strip('"') for block in parsed["variables.tf"]["variable"] for name in block}
    used = {name for file in AWS.glob("*.tf") for name in re.findall(r"\bvar\.(\w+)", file.read_text())}
    assert used == declared
    outputs = {name.strip('"') for block in parsed["outputs.tf"]["output"] for name in block}
    assert outputs == {"store", "node_role"}


def test_the_files_are_formatted() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("no `terraform` on the PATH")
    done = subprocess.run(["terraform", "fmt", "-check", "-recursive", "-diff", AWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def _prefix(store: S3Store) -> str:
    return store.url.removeprefix(f"s3://{s3_servers.BUCKET}/").partition("?")[0]
