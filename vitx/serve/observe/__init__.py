"""Observability: metrics, statistics, access log, traces, `vitx top`."""
