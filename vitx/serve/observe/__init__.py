"""What the server tells of itself: metrics, statistics, access log, traces, `vitx top`."""
