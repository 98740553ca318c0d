"""The compatibility module: which torch it accepts, and that what it leans on is there."""

from __future__ import annotations

import pytest
import torch

from fsdp_compile import compat


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.14.0a0+git1234"])
def test_supported_versions(version: str) -> None:
    compat.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.1.0", "2.10.0", "2.15.0", "3.0"])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ImportError, match=rf"this is torch {version}.*pip install 'torch==2\.13\.\*'"):
        compat.check_torch_version(version)


def test_the_backend_is_found_by_name() -> None:
    assert "fsdp" in torch._dynamo.list_backends()
    from torch._dynamo.backends.registry import lookup_backend

    assert lookup_backend("fsdp").__module__ == "fsdp_compile.backend"
