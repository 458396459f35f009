"""Who does which shard: leases in SQLite, or in PostgreSQL for several machines."""
