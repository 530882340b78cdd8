"""Fixtures of this folder."""

from object_fixtures import bucket_environment, object_server

__all__ = ["bucket_environment", "object_server"]
