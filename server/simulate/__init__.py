"""`hearth simulate`: the real scheduler, synthetic tenants, and a machine that is a formula."""
