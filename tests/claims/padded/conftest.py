"""What every test of padded batches needs."""

from tests.claims.equivalence.conftest import small_groups  # noqa: F401 - in the same groups as collated ones
