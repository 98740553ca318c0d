"""Graph → graph: insert, bucket, schedule, verify, lower. Pure functions over FX graphs; no process group, no GPU."""
