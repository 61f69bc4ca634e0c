"""A database, for tests of what runs read and write."""

from tests.databases import data, db, empty_database

__all__ = ["data", "db", "empty_database"]
