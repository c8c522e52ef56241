"""What the stand-in for FlashInfer does not have: modules and attributes that are looked for, and are not there."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys

import pytest

from flashnorm.integrations import flashinfer as integration
from tests.test_integration_flashinfer import left_as_found  # noqa: F401

pytestmark = pytest.mark.cpu_only


def test_what_is_missing_says_why():
    with integration.install():
        import flashinfer

        with pytest.raises(AttributeError, match=r"flashinfer.single_decode.*norms alone"):
            _ = flashinfer.single_decode
        with pytest.raises(ModuleNotFoundError, match=r"flashinfer.decode"):
            importlib.import_module("flashinfer.decode")
        assert not hasattr(flashinfer, "page")


def test_optional_parts_are_looked_for_without_an_error():
    """As engines do: `find_spec(...) is not None`."""
    with integration.install():
        for name in ("flashinfer.comm", "flashinfer.cute_dsl.moe", "flashinfer.norm.more"):
            assert importlib.util.find_spec(name) is None
            with pytest.raises(ModuleNotFoundError) as raised:
                importlib.import_module(name)
            assert raised.value.name == name
        with pytest.raises(ImportError, match="comm"):
            from flashinfer import comm  # noqa: F401
        assert importlib.util.find_spec("flashinfer.norm") is not None


def test_an_editable_flashinfer_is_hidden(monkeypatch):
    """Its finder knows modules by their full names, whatever the path of their package."""

    class Editable:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "flashinfer.decode" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    with integration.install():
        with pytest.raises(ModuleNotFoundError, match=r"flashinfer.decode.*norms alone"):
            importlib.import_module("flashinfer.decode")
        assert importlib.util.find_spec("flashinfer.comm") is None
